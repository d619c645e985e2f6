"""Typed output: the arguments ``schema=``, ``type=``, ``tools=`` and ``tags=`` of ``gen``.

Reading order: ``values`` makes a gen's type from its arguments. ``json_types`` describes Python types as JSON
schemas and reads their values, also from JSON that is still being generated; ``recursion`` bounds the depth
of recursive types. ``json_form`` writes values so that their types can read them again. ``tools`` describes
functions and reads calls of them, ``replies`` has the turns of conversations, and ``tags`` constrains places
in free text. ``finite`` lists the texts of a gen that is scored, and ``decisions`` has the questions of
``s.decide`` and their answers.
"""
