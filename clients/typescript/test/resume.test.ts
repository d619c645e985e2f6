// Connections that break at any frame: the texts are complete, and every op is accepted exactly once.

import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { ServerLost } from "../src/errors.js";
import { connect, type ConnectOptions, type Session } from "../src/session.js";
import { FakeServer, settle, turn } from "./support/fake_server.js";

async function opened(server: FakeServer, options: ConnectOptions = {}): Promise<Session> {
  const connecting = connect({ url: "ws://fake", WebSocket: server.WebSocket, ...options });
  connecting.catch(() => {});
  await settle(server);
  return connecting;
}

const text = fc.string({ unit: "binary", maxLength: 40 });
const step = fc.oneof(
  { weight: 4, arbitrary: fc.constant({ kind: "up" as const }) },
  { weight: 4, arbitrary: fc.constant({ kind: "down" as const }) },
  {
    weight: 6,
    arbitrary: fc.record({ kind: fc.constant("progress" as const), which: fc.nat(), size: fc.nat({ max: 9 }) }),
  },
  { weight: 2, arbitrary: fc.constant({ kind: "append" as const }) },
  { weight: 1, arbitrary: fc.constant({ kind: "cut" as const }) },
);

test("texts are whole and ops are accepted once, wherever connections break", async () => {
  await fc.assert(
    fc.asyncProperty(
      fc.array(text, { minLength: 1, maxLength: 6 }),
      fc.array(step, { maxLength: 60 }),
      async (texts, steps) => {
        const names = texts.map((_, index) => `text ${index}`);
        const server = new FakeServer(new Map(names.map((name, index) => [name, texts[index]!])));
        const lines: { sent?: object; received?: object }[] = [];
        const session = await opened(server, { record: (line) => lines.push(line) });
        const waiting = [...names];
        const results: Promise<string>[] = [];
        const streamed: Promise<string[]>[] = [];
        const ends: Promise<void>[] = [];
        const append = (): void => {
          const name = waiting.shift();
          if (name === undefined) return;
          const state = session.state();
          const variable = state.text("prompt").gen(name);
          results.push(Promise.resolve(variable));
          streamed.push(collected(variable));
          ends.push(state.done());
          state.close();
        };
        for (const one of steps) {
          const { socket } = server;
          if (one.kind === "append") append();
          else if (one.kind === "up") socket.deliverUp();
          else if (one.kind === "down") socket.deliverDown();
          else if (one.kind === "cut") socket.end(1006);
          else if (server.unfinished.length && socket.isOpen && socket.sent.length) {
            const number = server.unfinished[one.which % server.unfinished.length]!;
            if (hasBeenGreeted(server)) server.send(...server.progress(number, one.size));
          }
          await turn();
        }
        while (waiting.length) append();
        const isOver = (): boolean =>
          server.isEmpty && server.accepted.filter(({ op }) => op === "gen").length === texts.length;
        for (let round = 0; !isOver(); round++) {
          assert.ok(round < 500, "it does not end");
          await settle(server, () => session.status === "open");
          server.send(...server.unfinished.flatMap((number) => server.progress(number, 7)));
        }
        assert.deepEqual(await Promise.all(results), texts);
        assert.deepEqual((await Promise.all(streamed)).map((pieces) => pieces.join("")), texts);
        await Promise.all(ends);
        // What was sent again is recorded once, and who reads which text is not.
        const recorded = server.accepted.filter(({ op }) => op !== "want");
        assert.ok(recorded.length < server.accepted.length);
        assert.deepEqual(lines.flatMap(({ sent }) => sent ?? []), recorded);
        const received = lines.flatMap((line) => line.received ?? []) as { text?: string }[];
        assert.equal(received.map((event) => event.text ?? "").join("").length, texts.join("").length);
        const closing = session.close();
        await settle(server);
        await closing;
      },
    ),
    { numRuns: Number(process.env["FC_RUNS"] ?? 100), includeErrorInReport: true },
  );
});

async function collected(pieces: AsyncIterable<string>): Promise<string[]> {
  const found: string[] = [];
  for await (const piece of pieces) found.push(piece);
  return found;
}

/** Whether the hello of the current connection was handled: before, the server sends no events. */
function hasBeenGreeted(server: FakeServer): boolean {
  return server.socket.numUp === 0 || server.socket.sent[0]?.frame !== "hello" || server.socket.sent.length > 1;
}

test("an answer that was lost with the connection is requested again", async () => {
  const server = new FakeServer();
  const session = await opened(server);
  const stats = session.stats();
  await turn();
  server.socket.deliverUp(); // accepted
  server.send();
  server.socket.end(1006); // and the answer is lost
  await turn();
  await settle(server, () => session.status === "open");
  server.send();
  await settle(server);
  assert.equal((await stats).model, "fake");
  await Promise.all([session.close(), settle(server)]);
});

test("the graphs of a session and of its tenant come once, and are requested again if they were lost", async () => {
  const server = new FakeServer();
  const lines: { sent?: { op: string }; received?: object }[] = [];
  const session = await opened(server, { record: (line) => lines.push(line) });
  session.state();
  const graph = session.graph();
  const graphs = session.graphs();
  await turn();
  server.socket.deliverUp(); // accepted
  server.send();
  server.socket.end(1006); // and the answers are lost
  await turn();
  await settle(server, () => session.status === "open");
  server.send();
  await settle(server);
  assert.deepEqual((await graph).states?.map(({ id }) => id), [1]);
  assert.deepEqual((await graphs).map(({ states }) => states?.[0]?.label), [undefined, "other"]);
  assert.deepEqual(lines.flatMap(({ sent }) => sent?.op ?? []), ["open"]);
  await Promise.all([session.close(), settle(server)]);
});

for (const code of [1000, 1002, 1007, 1008, 1012, 4001]) {
  test(`close code ${code} ends the session`, async () => {
    const server = new FakeServer(new Map([["answer", "never"]]));
    const session = await opened(server);
    const seen: string[] = [];
    session.onStatus((status) => seen.push(status));
    const state = session.state();
    const answer = state.gen("answer");
    const done = state.done();
    server.socket.end(code);
    await assert.rejects(Promise.resolve(answer), ServerLost);
    await assert.rejects(done, ServerLost);
    await assert.rejects(session.stats(), ServerLost);
    assert.throws(() => session.state(), ServerLost);
    assert.deepEqual(seen, ["closed"]);
    assert.equal(server.sockets.length, 1);
    assert.ok(answer.error instanceof ServerLost);
  });
}

/** Resolves when the session has ended. */
function ended(session: Session): Promise<void> {
  return new Promise((resolve) => {
    session.onStatus((status) => {
      if (status === "closed") resolve();
    });
  });
}

test("a ticket that cannot be had for a moment does not end the session", { timeout: 20_000 }, async () => {
  const server = new FakeServer(new Map([["answer", "whole"]]));
  const tickets: (string | Error)[] = ["t1", new TypeError("Failed to fetch"), "t3"];
  const ticket = async (): Promise<string> => {
    const next = tickets.shift()!;
    if (next instanceof Error) throw next;
    return next;
  };
  const session = await opened(server, { ticket });
  const answer = session.state().gen("answer");
  await settle(server);
  server.send(...server.progress(answer.number, 2));
  await settle(server);
  server.socket.end(1006);
  await settle(server, () => session.status !== "lost");
  assert.equal(session.status, "open");
  assert.deepEqual(server.socket.protocols, ["agentflow.v2", "agentflow.ticket.t3"]);
  server.send(...server.progress(answer.number, 9));
  await settle(server);
  assert.equal(await answer, "whole");
  await Promise.all([session.close(), settle(server)]);
});

test("a ticket that never comes ends the session with the grace", { timeout: 20_000 }, async () => {
  const server = new FakeServer();
  server.graceS = 0.2;
  let numAsked = 0;
  const ticket = (): Promise<string> => (++numAsked === 1 ? Promise.resolve("t1") : new Promise(() => {}));
  const session = await opened(server, { ticket, openTimeoutS: 0.05 });
  const end = ended(session);
  server.socket.end(1006);
  await end;
  assert.ok(session.error instanceof ServerLost);
  assert.equal(server.sockets.length, 1);
});

test("a server that does not come back within the grace ends the session", async () => {
  const server = new FakeServer();
  server.graceS = 0.05;
  const session = await opened(server);
  const closed = ended(session);
  server.refusesConnections = true;
  server.socket.end(1006);
  assert.equal(session.status, "lost");
  await closed;
  assert.ok(session.error instanceof ServerLost);
  assert.ok(server.sockets.length > 1);
});

test("f37: the client's own small ops find room in a full buffer", { timeout: 20_000 }, async () => {
  const server = new FakeServer(new Map([["answer", "whole"]]));
  const session = await opened(server, { maxBufferedBytes: 400, keepaliveS: 0.2 });
  const closing = session.state();
  const answer = closing.gen("answer");
  closing.close(); // delayed until the answer has arrived
  await settle(server);
  server.send(); // acknowledges
  await settle(server);
  const state = session.state();
  assert.throws(() => {
    for (;;) state.begin("user").end();
  }, { code: "backlog_full" });
  server.send(...server.progress(answer.number, 9));
  server.socket.deliverDown(); // now the close is due
  assert.equal(await answer, "whole");
  const stats = session.stats();
  state.cancel();
  state.close();
  const statuses = new Promise<string[]>((resolve) => {
    const seen: string[] = [];
    session.onStatus((status) => seen.push(status) === 2 && resolve(seen));
  });
  const carrying = settle(server, () => server.sockets.length === 2 && session.status === "open");
  assert.deepEqual(await statuses, ["lost", "open"]); // after a question of the timer, which stays unanswered
  await carrying;
  server.send();
  await settle(server);
  assert.equal((await stats).model, "fake");
  assert.ok(server.isEmpty);
  await Promise.all([session.close(), settle(server)]);
});

test("an error of the server ends the session with its class", async () => {
  const server = new FakeServer();
  const session = await opened(server);
  const refused = assert.rejects(session.stats(), { code: "rate_limited", retryAfterS: 2, name: "RateLimited" });
  server.socket.down({ frame: "refused", error: { code: "rate_limited", message: "slowly", retry_after_s: 2 } });
  await settle(server);
  await refused;
  assert.equal(session.status, "closed");
});

for (const frame of ["{", "[]", '{"frame":"welcome"}', '{"frame":"events","ack":99}']) {
  test(`the frame ${frame} ends the session`, async () => {
    const server = new FakeServer();
    const session = await opened(server);
    server.socket.onmessage?.({ data: frame });
    assert.equal(session.error?.code, "protocol_error");
  });
}

test("text after a gap ends the session", async () => {
  const server = new FakeServer(new Map([["answer", "abc"]]));
  const session = await opened(server);
  const answer = session.state().gen("answer");
  await settle(server);
  server.send({ event: "delta", var: answer.number, at: 1, text: "b" });
  await settle(server);
  assert.equal(answer.error?.code, "protocol_error");
});
