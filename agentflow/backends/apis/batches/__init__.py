"""The batches of vendors: many requests at half the price, answered within a day.

``batch_api`` is the interface to a vendor's endpoints, ``openai_batches`` and ``anthropic_batches`` implement
it. ``batched_format`` writes a call as a request of a batch. ``batched_generator`` gives its calls to the
``collector``, which collects the calls of a stage, sends them as batches, and answers each call.
"""
