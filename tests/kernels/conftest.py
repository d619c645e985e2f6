"""Lets the tests in all folders here import ``kernel_cases``: the folder of a conftest is on the path."""
