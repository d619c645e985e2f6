// Node.js 20 has no websockets: programs that are written for browsers get those of the package ws.

import WebSocket from "ws";

(globalThis as { WebSocket?: unknown }).WebSocket ??= WebSocket;
