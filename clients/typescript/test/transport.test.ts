// How a connection is opened: addresses, tickets, the answers of servers that refuse, silence.

import assert from "node:assert/strict";
import { afterEach, mock, test } from "node:test";
import { NotAuthorized } from "../src/errors.js";
import { connect } from "../src/session.js";
import { FakeServer, settle, turn } from "./support/fake_server.js";

interface Request {
  url: string;
  method: string | undefined;
  key: string | undefined;
}

let requests: Request[] = [];

/** The answers of the HTTP interface, in their order; the last one is repeated. */
function answer(...answers: (Response | Error)[]): void {
  requests = [];
  mock.method(globalThis, "fetch", (url: string, init: RequestInit) => {
    const key = (init.headers as Record<string, string>)["Authorization"];
    requests.push({ url, method: init.method, key });
    const next = answers.length > 1 ? answers.shift()! : answers[0]!;
    return next instanceof Error ? Promise.reject(next) : Promise.resolve(next.clone());
  });
}

const json = (status: number, body: object, headers: Record<string, string> = {}): Response =>
  new Response(JSON.stringify(body), { status, headers: { "Content-Type": "application/json", ...headers } });

afterEach(() => {
  mock.restoreAll();
  mock.timers.reset();
});

for (const [given, ws, http] of [
  ["ws://host:1", "ws://host:1/v1/session", "http://host:1"],
  ["https://host/", "wss://host/v1/session", "https://host"],
  ["wss://host/af/v1/session", "wss://host/af/v1/session", "https://host/af"],
] as const) {
  test(`${given} is the address of a server`, async () => {
    const server = new FakeServer();
    answer(json(200, { ticket: "t1", expires_in_s: 30 }), json(200, { ticket: "t2", expires_in_s: 30 }));
    const connecting = connect({ url: given, key: "af-key", WebSocket: server.WebSocket });
    await settle(server, () => server.sockets.length > 0).catch(() => {});
    await settle(server);
    const session = await connecting;
    assert.equal(server.socket.url, ws);
    assert.deepEqual(server.socket.protocols, ["agentflow.v2", "agentflow.ticket.t1"]);
    // A ticket opens one connection.
    server.socket.end(1006);
    await settle(server, () => session.status === "open");
    assert.deepEqual(server.socket.protocols, ["agentflow.v2", "agentflow.ticket.t2"]);
    assert.equal(server.socket.url, `${ws}?session=s1`);
    const request = { url: `${http}/v1/session-ticket`, method: "POST", key: "Bearer af-key" };
    assert.deepEqual(requests, [request, { ...request, url: `${request.url}?session=s1` }]);
    await Promise.all([session.close(), settle(server)]);
  });
}

test("the address of a new session has its model, and that of a resumed one its id", async () => {
  const server = new FakeServer();
  answer(json(200, { ticket: "t1", expires_in_s: 30 }), json(200, { ticket: "t2", expires_in_s: 30 }));
  const url = "ws://host:1/v1/session";
  const connecting = connect({ url, key: "af-key", model: "large model", WebSocket: server.WebSocket });
  await settle(server, () => server.sockets.length > 0).catch(() => {});
  await settle(server);
  const session = await connecting;
  assert.equal(server.socket.url, `${url}?model=large+model`);
  server.socket.end(1006);
  await settle(server, () => session.status === "open");
  assert.equal(server.socket.url, `${url}?session=s1`);
  const queries = requests.map((request) => request.url.split("?")[1]);
  assert.deepEqual(queries, ["model=large+model", "session=s1"]);
  await Promise.all([session.close(), settle(server)]);
});

for (const url of ["host", "ftp://host", "http://", "ws://user:key@host"]) {
  test(`${url} is no address`, async () => {
    await assert.rejects(connect({ url, WebSocket: new FakeServer().WebSocket }), { code: "bad_argument" });
  });
}

for (const [status, code] of [
  [401, "not_authorized"],
  [403, "not_authorized"],
  [404, "server_unreachable"],
  [429, "rate_limited"],
  [503, "overloaded"],
] as const) {
  for (const key of ["af-key", undefined]) {
    test(`status ${status} ${key ? "for a ticket" : "for a handshake"} is ${code}`, async () => {
      const server = new FakeServer();
      server.refusesConnections = true;
      answer(json(status, { error: { message: "why not" } }, { "Retry-After": "3" }));
      await assert.rejects(connect({ url: "ws://host", key, WebSocket: server.WebSocket }), (error: Error) => {
        assert.equal((error as { code?: string }).code, code);
        if (status === 429 || status === 503) assert.equal((error as { retryAfterS?: number }).retryAfterS, 3);
        if (status !== 404) assert.match(error.message, /why not/);
        assert.ok(!error.message.includes("af-key"));
        return true;
      });
      assert.equal(requests[0]!.url, `http://host${key ? "/v1/session-ticket" : "/v1/models"}`);
    });
  }
}

test("a callback for tickets that fails or hangs leaves the server unreachable", { timeout: 20_000 }, async () => {
  const { WebSocket } = new FakeServer();
  const cause = new TypeError("Failed to fetch");
  const failing = connect({ url: "ws://host", ticket: () => Promise.reject(cause), WebSocket });
  await assert.rejects(failing, { code: "server_unreachable", cause });
  const throwing = connect({ url: "ws://host", ticket: () => { throw cause; }, WebSocket });
  await assert.rejects(throwing, { code: "server_unreachable", cause });
  const rejected = new NotAuthorized("not signed in");
  const refusing = connect({ url: "ws://host", ticket: () => Promise.reject(rejected), WebSocket });
  await assert.rejects(refusing, rejected);
  const hanging = new Promise<string>(() => {});
  const waiting = connect({ url: "ws://host", ticket: () => hanging, openTimeoutS: 0.01, WebSocket });
  await assert.rejects(waiting, { code: "server_unreachable" });
  const leaving = new AbortController();
  const left = connect({ url: "ws://host", ticket: () => hanging, signal: leaving.signal, WebSocket });
  leaving.abort(new Error("left"));
  await assert.rejects(left, /left/);
});

test("an answer without JSON is no ticket, and the server is unreachable", async () => {
  answer(new Response("<html>Sign in to this network</html>", { headers: { "Content-Type": "text/html" } }));
  const { WebSocket } = new FakeServer();
  await assert.rejects(connect({ url: "ws://host", key: "af-key", WebSocket }), { code: "server_unreachable" });
});

test("without any answer the server is unreachable", async () => {
  const server = new FakeServer();
  server.refusesConnections = true;
  answer(new TypeError("fetch failed"));
  await assert.rejects(connect({ url: "ws://host", WebSocket: server.WebSocket }), { code: "server_unreachable" });
  answer(json(200, {}));
  await assert.rejects(connect({ url: "ws://host", WebSocket: server.WebSocket }), { code: "server_unreachable" });
});

test("a server that says nothing is unreachable after the time limit, and connecting can be aborted", async () => {
  const options = { url: "ws://host", WebSocket: new FakeServer().WebSocket };
  await assert.rejects(connect({ ...options, openTimeoutS: 0.02 }), { code: "server_unreachable" });
  const controller = new AbortController();
  const connecting = connect({ ...options, signal: controller.signal });
  await turn();
  controller.abort(new Error("enough"));
  await assert.rejects(connecting, { message: "enough" });
  await assert.rejects(connect({ ...options, signal: controller.signal }), { message: "enough" });
});

test("a signal closes an open session", async () => {
  const server = new FakeServer();
  const controller = new AbortController();
  const connecting = connect({ url: "ws://host", WebSocket: server.WebSocket, signal: controller.signal });
  await settle(server);
  const session = await connecting;
  controller.abort();
  await settle(server);
  assert.equal(session.status, "closed");
  assert.equal(server.socket.sent.at(-1)?.frame, "bye");
});

test("without a class of websockets there is a sentence that says so", async () => {
  const own = Object.getOwnPropertyDescriptor(globalThis, "WebSocket");
  Reflect.deleteProperty(globalThis, "WebSocket");
  try {
    await assert.rejects(connect({ url: "ws://host" }), { code: "bad_argument" });
  } finally {
    if (own) Object.defineProperty(globalThis, "WebSocket", own);
  }
});

test("after silence the client asks, and after more silence it takes a new connection", async () => {
  const server = new FakeServer();
  mock.timers.enable({ apis: ["setTimeout", "Date"] });
  const pass = async (): Promise<void> => {
    for (let round = 0; round < 20; round++) {
      await new Promise(setImmediate);
      mock.timers.tick(0);
      const { socket } = server;
      if (socket?.numUp) socket.deliverUp();
      else if (socket?.numDown) socket.deliverDown();
    }
  };
  const connecting = connect({ url: "ws://host", WebSocket: server.WebSocket, keepaliveS: 20 });
  await pass();
  const session = await connecting;
  mock.timers.tick(20_000);
  await pass();
  assert.equal(server.accepted.at(-1)?.op, "getstats");
  server.send(); // the answer
  await pass();
  mock.timers.tick(20_000);
  await pass();
  mock.timers.tick(19_000);
  await pass();
  assert.equal(server.sockets.length, 1);
  mock.timers.tick(1_000); // no answer to the second question
  await pass();
  assert.equal(server.sockets.length, 2);
  assert.equal(session.status, "open");
  const closing = session.close();
  await pass();
  await closing;
});
