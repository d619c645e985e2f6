"""What a program sees of failures.

Reading order: ``frames`` finds the program's own lines, ``mistakes`` says what to write instead, and
``reported`` makes the exceptions for failures that the backend reports. ``user_code`` contains failures of
the user's own code.
"""
