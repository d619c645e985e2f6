"""Programs over HTTP: requests that are connected by variables, in the form of Parrot's API.

Parrot: Lin et al., OSDI 2024.

``types`` has the JSON shapes, ``prompt`` reads prompts with placeholders, ``programs`` has the endpoints,
``answer`` the answers and errors, ``elsewhere`` answers for programs of other servers, and ``routes`` has the
paths.
"""
