"""The store that several servers share, so that responses, programs and limits survive the loss of one.

A *front* is one server process before its engines. ``shared`` is the connection to Redis and a front's place
in it, ``fronts`` knows which fronts are alive and sends requests from one to another, and ``entries`` has
bounded values of tenants. Session tickets, stored responses, rate limits and the values of programs have
shared implementations next to the implementations for one process.
"""
