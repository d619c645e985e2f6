"""Lets the tests of all folders here import ``kernel_cases``: pytest puts the folder of a conftest on the path."""
