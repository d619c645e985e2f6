"""Grammars as trees, for the engine and for the backends behind APIs.

``parts`` has the parts of a rule, and ``char_ranges`` their sets of characters. ``gbnf`` reads grammars in
GBNF, ``lexemes`` decides which rules may be terminals of a lexer, and ``recognition`` recognises the texts of
a grammar. ``pattern_parts`` divides regular expressions.
"""
