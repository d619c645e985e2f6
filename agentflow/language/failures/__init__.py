"""Failures that the program itself causes.

Reading order: ``stack_frames`` finds the program's lines in a traceback, ``mistakes`` has the messages for
typical mistakes, and ``user_code`` contains failures of tools and other functions of the user.
"""
