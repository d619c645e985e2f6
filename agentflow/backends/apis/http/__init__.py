"""The HTTP side of backends behind an API.

``transport`` sends a request over ``connections`` and reads its stream, with retries; ``pacing`` decides when
it is sent, by how many requests a provider accepts at a time and by the limits that it reports
(``rate_limits``); ``event_stream`` reads server-sent events; ``api_errors`` explains refusals. ``file_slots``
puts files into a body while it is sent.
"""
