"""Typed output: what ``gen``'s ``schema``, ``type``, ``tools`` and ``tags`` mean.

Reading order: ``json_types`` describes Python types as JSON schemas and reads their values, also of JSON that
is still generated. ``json_form`` writes values as their types read them. ``tools`` describes functions and
reads calls of them. ``replies`` are turns of conversations. ``values`` makes a gen's type of its arguments.
``tags`` constrains places in free text.
"""
