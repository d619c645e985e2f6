"""Runs the op streams of one session.

Reading order: ``state_tree`` has the records of states and variables and spreads failures, and
``interpreter`` runs the ops on both. ``wired_text`` waits for the variables that a text refers to,
``image_store`` keeps the images that the session has uploaded, and ``observation`` lets the client watch the
scheduler.
"""
