"""The APIs' common core: how a request runs on a model, and how its answers are read.

``request`` has the request and the deltas of its answers, in one form for all APIs. ``logprobs`` reads the
tokens of an answer with their log-probabilities, and ``checks`` compares an answer with the schemas of its
request. ``engine_run`` runs a request on an engine and turns its progress into deltas, ``api_run`` does so
for a model behind an API, ``completion`` collects the deltas of several requests, and ``streaming`` sends
them as events. ``large_answers`` writes many log-probabilities in a thread. Each API translates its requests
into a ``CompletionRequest``, and the deltas into its answers."""
