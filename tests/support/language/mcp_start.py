"""Starts an MCP server fast: ``mcp_start.py PATH ARGUMENT…`` gives its stdin and stdout to a fork of the
process that listens at ``PATH`` (``mcp_server.py forks PATH``), and ends with the fork."""

import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    socket.send_fds(connection, ["\0".join(sys.argv[2:]).encode()], [0, 1])
    os.close(0)
    os.close(1)
    connection.recv(1)  # returns at the end of the fork
