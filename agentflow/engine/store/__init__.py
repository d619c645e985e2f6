"""Finds and pulls the models on this computer.

Read ``model_store`` (names, and the store of the default model), ``hub_names``, ``hub`` and ``hub_errors``
(the Hugging Face hub: its cache, and pulls into it), ``catalog`` (short names), ``model_folder`` (checks
before a model is loaded) with ``native_architectures``, ``weight_scheme`` (quantised folders),
``adapter_folder`` and ``embedding_folder``, ``config_parts`` and ``config_defaults`` (``config.json`` with
the defaults of transformers), ``model_identity`` (a digest of the files), ``gguf`` (reads GGUF files),
``pip_download`` (fetches a file from a wheel) and ``pull_progress`` (the progress of a pull).
"""
