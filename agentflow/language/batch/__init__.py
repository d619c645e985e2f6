"""One program on many inputs.

Reading order: ``inputs`` reads them, also from dataframes; ``map`` runs the program on each; ``retries`` says
which failures are run again; ``results_file`` keeps results, so that an interrupted batch goes on;
``progress`` is the bar.
"""
