"""One program on many inputs.

Reading order: ``inputs`` reads inputs from iterables and tables, ``map`` runs the program on each, and
``retries`` decides which failures are run again. ``results_file`` keeps results on disk, so that an
interrupted map can continue. ``batches`` is for maps whose generations run in batches of a vendor.
``progress`` draws the progress bar. ``embeddings`` embeds many texts.
"""
