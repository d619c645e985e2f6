// The ops that states and graphs record, and the mistakes that they find before anything is sent.

import assert from "node:assert/strict";
import { test } from "node:test";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import { Cancelled, Overloaded } from "../src/errors.js";
import { Graph } from "../src/graph.js";
import { image } from "../src/image.js";
import { OpQueue } from "../src/op_queue.js";
import type { Op } from "../src/protocol.js";
import { connect, type Session } from "../src/session.js";
import type { State } from "../src/state.js";
import type { ChatMessage } from "../src/transcript.js";
import { FakeServer, settle, turn } from "./support/fake_server.js";

const texts = new Map(["a", "b", "answer", "grade"].map((name) => [name, name]));

async function opened(server: FakeServer): Promise<Session> {
  const connecting = connect({ url: "ws://fake", WebSocket: server.WebSocket });
  await settle(server);
  return connecting;
}

/** The recorded ops of a graph, without their numbers. */
function recorded(build: (graph: Graph) => void): object[] {
  const graph = new Graph();
  build(graph);
  return graph.ops.slice(1).map((op: Op) => {
    const { state: _state, var: _var, ...rest } = op as unknown as Record<string, unknown>;
    return rest;
  });
}

test("turns, texts and references are ops in their order", () => {
  const ops = recorded(({ root }) => {
    root.system("Be brief.").user("Why?");
    const answer = root.gen("answer", { maxTokens: 8, stop: "\n", seed: 1 });
    root.user("Because ", answer.strip().json("a.b"), ".");
    root.select("grade", ["A", "B"], { method: "greedy_token_selection" });
  });
  assert.deepEqual(ops, [
    { op: "begin", role: "system" },
    { op: "text", parts: ["Be brief."] },
    { op: "end" },
    { op: "begin", role: "user" },
    { op: "text", parts: ["Why?"] },
    { op: "end" },
    { op: "begin", role: "assistant" },
    { op: "gen", name: "answer", params: { max_tokens: 8, seed: 1, stop: ["\n"] } },
    { op: "end" },
    { op: "begin", role: "user" },
    {
      op: "text",
      parts: ["Because ", { op: "ref", var: 2, transforms: [["strip"], ["json", "a.b"]] }, "."],
    },
    { op: "end" },
    { op: "begin", role: "assistant" },
    { op: "select", name: "grade", choices: ["A", "B"], method: "greedy_token_selection" },
    { op: "end" },
  ]);
});

test("the transforms of a reference", () => {
  const ops = recorded(({ root }) => {
    const x = root.set("x", "1. a");
    root.text(x.items("comma", -1).xml("b").yaml("c.0"), x.items(), x.firstNumber(), x.date("%d").enum(["7", "8"]));
  });
  const { parts } = ops.at(-1) as unknown as { parts: { transforms: unknown }[] };
  assert.deepEqual(
    parts.map((part) => part.transforms),
    [
      [["items", "comma.-1"], ["xml", "b"], ["yaml", "c.0"]],
      [["items", "numbered"]],
      [["number"]],
      [["date", "%d"], ["enum", '["7","8"]']],
    ],
  );
});

test("a fork continues on another model with the content as text", () => {
  const graph = new Graph({ model: "small" });
  graph.root.system("Be brief.").user("Why?");
  const answer = graph.root.gen("answer");
  graph.root.user("So: ");
  const number = graph.ops.length;
  const [other] = graph.root.fork(1, { model: "large" });
  other!.begin("assistant");
  assert.equal(other!.model, "large");
  const state = other!.number;
  assert.deepEqual(graph.ops.slice(number), [
    { op: "fork", state: 1, children: [state], model: "large" },
    { op: "begin", state, role: "system" },
    { op: "text", state, parts: ["Be brief."] },
    { op: "end", state },
    { op: "begin", state, role: "user" },
    { op: "text", state, parts: ["Why?"] },
    { op: "end", state },
    { op: "begin", state, role: "assistant" },
    { op: "text", state, parts: [{ op: "ref", var: answer.number }] },
    { op: "end", state },
    { op: "begin", state, role: "user" },
    { op: "text", state, parts: ["So: "] },
    { op: "end", state },
    { op: "begin", state, role: "assistant" },
  ]);
  const [same] = graph.root.fork(1, { model: "small" });
  assert.deepEqual(graph.ops.at(-1), { op: "fork", state: 1, children: [same!.number] });
  const talk = new Graph();
  talk.root.converse([{ role: "user", content: "Hi" }]);
  assert.throws(() => talk.root.fork(1, { model: "large" }), { code: "not_supported", param: "model" });
});

test("a model that the session does not have is refused before anything is sent", async () => {
  const server = new FakeServer(texts);
  const session = await opened(server);
  const state = session.state({ model: "fake" });
  assert.equal(session.state().model, "fake");
  assert.throws(() => session.state({ model: "large" }), { code: "unknown_model", param: "model" });
  assert.throws(() => state.fork(1, { model: "constructor" }), { code: "unknown_model" });
  const graph = new Graph();
  graph.root.fork(1, { model: "large" });
  assert.throws(() => session.submit(graph), { code: "unknown_model" });
  await settle(server);
  assert.deepEqual(server.accepted.map((op) => op.op), ["open", "open"]);
  await Promise.all([session.close(), settle(server)]);
});

test("f37: a program that failed cancels its run with its error, and a cancelled one without", async () => {
  const server = new FakeServer(texts);
  const session = await opened(server);
  const failures: [unknown, object | undefined][] = [
    [new RangeError("no more rows"), { type: "RangeError", message: "no more rows" }],
    [new Overloaded("try again later"), { type: "Overloaded", message: "try again later" }],
    [new Error(), { type: "Error" }],
    [new Error("é".repeat(700)), { type: "Error", message: "é".repeat(500) }],
    [new Error("a" + "😀".repeat(700)), { type: "Error", message: "a" + "😀".repeat(249) }],
    [new Error("\ud83d!"), { type: "Error", message: "\ufffd!" }],
    ["a text", { type: "string", message: "a text" }],
    [Object.create(null), { type: "object" }],
    [undefined, undefined],
    [new Cancelled("variable 2 was cancelled"), undefined],
    [AbortSignal.abort().reason, undefined],
  ];
  for (const [failure] of failures) session.state().cancel({ failure });
  const graph = new Graph();
  session.submit(graph).cancel({ failure: failures[0]![0] });
  session.submit(graph).cancel();
  await settle(server);
  const cancels = server.accepted.filter((op) => op.op === "cancel");
  assert.deepEqual(
    cancels.map((op) => op.failure),
    [...failures.map(([, sent]) => sent), failures[0]![1], undefined],
  );
  await Promise.all([session.close(), settle(server)]);
});

test("a conversation's turn ends with its reply", () => {
  const call = { id: "c1", name: "weather", arguments: "{}" };
  const ops = recorded(({ root }) => {
    root.converse([{ role: "user", content: "Cold?" }], [{ name: "weather", description: "", parameters: {} }]);
    root.gen("answer", { reply: true });
    root.tool(call, "3 degrees");
    root.gen("answer", { reply: true, whitespace: "tight" });
  });
  assert.deepEqual(ops.slice(1), [
    { op: "gen", name: "answer", params: {}, reply: true },
    { op: "end" },
    { op: "begin", role: "tool", tool_call_id: "c1", name: "weather" },
    { op: "text", parts: ["3 degrees"] },
    { op: "end" },
    { op: "begin", role: "assistant" },
    { op: "gen", name: "answer", params: {}, reply: true },
    { op: "end" },
  ]);
});

const ASKED = [{ role: "user", content: "Cold?" }];
const ANSWERED = [...ASKED, { role: "assistant", content: "Yes." }];

test("f37: turns continue a conversation", () => {
  const opsAfter = (messages: ChatMessage[], build: (state: State) => void): string[] =>
    recorded(({ root }) => build(root.converse(messages))).map((op) => {
      const { op: kind, role, parts } = op as { op: string; role?: string; parts?: string[] };
      return [kind, role ?? parts ?? []].flat().join(" ");
    });
  const user = ["begin user", "text And Rome?", "end"];
  const answer = ["begin assistant", "gen", "end"];
  const append = (state: State): void => void state.user("And Rome?").gen("answer");
  // What the conversation opened is the assistant's turn.
  assert.deepEqual(opsAfter(ASKED, (state) => append(state.assistant("Yes."))), [
    "converse", "text Yes.", "end", ...user, ...answer,
  ]);
  assert.deepEqual(opsAfter(ASKED, (state) => append(state.begin("assistant").text("Yes.").end())), [
    "converse", "text Yes.", "end", ...user, ...answer,
  ]);
  // A turn of the user ends it, and so does a reply, after which there is no open turn.
  assert.deepEqual(opsAfter(ASKED, (state) => append((state.text("It is ").gen("a"), state))), [
    "converse", "text It is ", "gen", "end", ...user, ...answer,
  ]);
  assert.deepEqual(opsAfter(ANSWERED, append), ["converse", "end", ...user, ...answer]);
  assert.deepEqual(opsAfter(ANSWERED, (state) => append((state.gen("a", { reply: true }), state))), [
    "converse", "gen", "end", ...user, ...answer,
  ]);
  assert.deepEqual(opsAfter([], append), [...user, ...answer]);
});

test("f37: a conversation waits for its answer: no turn of the assistant is empty", () => {
  const { root } = new Graph();
  root.tools([]).converse(ASKED);
  const [branch] = root.fork(1);
  for (const state of [root, branch!]) {
    assert.throws(() => state.end(), { code: "bad_argument" });
    assert.throws(() => state.user("And Rome?"), { code: "bad_argument" });
    assert.throws(() => state.begin("tool"), { code: "bad_argument" });
    assert.throws(() => state.gen("answer", { regex: "a", choices: ["b"] }), { code: "bad_argument" });
    assert.throws(() => state.end(), { code: "bad_argument" });
    state.gen("answer", { reply: true });
    assert.throws(() => state.end(), { code: "bad_argument" });
    state.user("And Rome?");
    assert.throws(() => state.converse(ASKED), { code: "bad_argument" });
  }
  assert.throws(() => new Graph().root.begin("user").converse(ASKED), { code: "bad_argument" });
  assert.throws(() => new Graph().root.text("Hi").converse([]), { code: "bad_argument" });
});

test("f37: a turn of the user that cannot be sent leaves the conversation's turn open", async () => {
  const server = new FakeServer(texts);
  const session = await opened(server);
  const state = session.state().converse(ANSWERED);
  assert.throws(() => state.user("half a pair: \ud83d"), { code: "bad_argument" });
  state.gen("answer", { reply: true });
  await settle(server);
  assert.deepEqual(server.accepted.map(({ op }) => op), ["open", "converse", "gen", "end"]);
  await Promise.all([session.close(), settle(server)]);
});

test("f37: the messages of a conversation are not those that the page adds to its list later", async () => {
  const server = new FakeServer(texts);
  const session = await opened(server);
  const history: ChatMessage[] = [...ANSWERED];
  const state = session.state().converse(history);
  assert.deepEqual(await state.messages(), ANSWERED);
  state.text(" Very.").user("And Rome?");
  history.push({ role: "user", content: "And Rome?" });
  assert.deepEqual(await state.messages(), [...ASKED, { role: "assistant", content: "Yes. Very." }, history[2]]);
  await Promise.all([session.close(), settle(server)]);
});

test("a gen has one constraint, and a schema a limit of its lengths", () => {
  const schema = { type: "object", properties: { name: { type: "string", maxLength: 9000 } } };
  const [gen] = recorded(({ root }) => root.gen("a", { schema, jumpForward: false, whitespace: "tight" }));
  assert.deepEqual((gen as { constraint: object }).constraint, {
    kind: "schema",
    source: JSON.stringify(schema),
    string_chars: 9000,
    list_items: 200,
    whitespace: "tight",
    jump_forward: false,
  });
  assert.throws(() => new Graph().root.gen("a", { regex: "a", choices: ["b"] }), { code: "bad_argument" });
});

test("long texts become several ops that divide no character", () => {
  const long = "a" + "😀".repeat(300_000);
  const ops = recorded(({ root }) => root.text(long, "end"));
  assert.ok(ops.length > 2);
  assert.equal(ops.flatMap((op) => (op as { parts: string[] }).parts).join(""), long + "end");
});

test("a run of a graph has numbers of the session, and its places give the seeds of Python", async () => {
  const server = new FakeServer(texts);
  const session = await opened(server);
  const graph = new Graph({ program: "judge", label: "essays" });
  const question = graph.input("question");
  graph.root.user(question);
  const answer = graph.root.gen("answer");
  const [left, right] = graph.root.fork(2);
  const a = left!.user("a").gen("a", { seed: 7 });
  const [inner] = right!.fork(1);
  const b = inner!.user("b").gen("b");
  graph.root.join(left!, inner!);
  assert.deepEqual(graph.variables, [answer, a, b]);
  session.state();
  const run = session.submit(graph, { live: true, inputs: { question: "Why?" }, seed: 42, outputs: [b, answer] });
  run.cancelBranch(inner!);
  await settle(server);
  const [, submit, cancel] = server.accepted;
  assert.ok(submit?.op === "submit");
  assert.equal(submit.state, 2);
  assert.deepEqual(submit.ops[0], { op: "open", state: 1, program: "judge", label: "essays" });
  assert.deepEqual(submit.ops[1], { op: "expect", state: 1, var: question.number, name: "question" });
  assert.deepEqual(submit.inputs, { [question.number]: "Why?" });
  assert.deepEqual(submit.outputs, [b.number, answer.number]);
  assert.equal(submit.live, true);
  assert.equal(submit.seeds, "42/0");
  assert.deepEqual(submit.places, { [answer.number]: "()/0", [b.number]: "(1, 0)/0" });
  assert.deepEqual(cancel, { op: "cancel", state: 1 + inner!.number });
  assert.equal(run.variable(b).number, 1 + b.number);
  assert.deepEqual(run.variables.map(({ name }) => name), ["b", "answer"]);
  assert.throws(() => run.variable(a), { code: "foreign_state" });
  assert.throws(() => session.submit(graph), { code: "bad_argument" });
  assert.throws(() => session.submit(graph, { inputs: { question: "", other: "" } }), { code: "bad_argument" });
  await Promise.all([session.close(), settle(server)]);
});

test("mistakes are found before anything is sent", async () => {
  const server = new FakeServer(texts);
  const session = await opened(server);
  const graph = new Graph();
  const recordedAnswer = graph.root.gen("answer");
  const state = session.state();
  assert.throws(() => state.end(), { code: "bad_argument" });
  assert.throws(() => state.begin("user").begin("user"), { code: "bad_argument" });
  state.end().begin("assistant").end();
  assert.throws(() => state.gen("answer"), { code: "bad_argument" });
  assert.throws(() => state.fork(-1), { code: "bad_argument" });
  assert.deepEqual(state.fork(0), []);
  state.taskGroup([]).join();
  assert.throws(() => state.text(recordedAnswer), { code: "foreign_state" });
  assert.throws(() => state.text("half \ud83d"), { code: "bad_argument" });
  state.text('a text with "\\ud83d" is whole');
  await assert.rejects(Promise.resolve(recordedAnswer), { code: "data_dependent" });
  assert.throws(() => graph.root.cancel(), { code: "data_dependent" });
  await assert.rejects(graph.root.done(), { code: "data_dependent" });
  state.seal();
  assert.throws(() => state.text("more"), { code: "state_closed", reason: "sealed" });
  state.close();
  state.close();
  state.cancel();
  assert.throws(() => state.read("text", "text"), { code: "state_closed", reason: "ended" });
  await settle(server);
  assert.deepEqual(server.accepted.map(({ op }) => op), ["open", "begin", "end", "begin", "end", "text", "seal", "close"]);
  await Promise.all([session.close(), settle(server)]);
  assert.throws(() => session.state(), { code: "state_closed" });
});

test("a number that is not finite is refused, as JSON would drop it", async () => {
  const server = new FakeServer(texts);
  const session = await opened(server);
  const state = session.state();
  const graph = new Graph();
  graph.root.limit({ outputTokens: NaN });
  for (const wrong of [NaN, Infinity, -Infinity]) {
    const param = new RegExp(String(wrong));
    for (const attempt of [
      () => state.limit({ deadlineS: wrong }),
      () => state.limit({ outputTokens: wrong }),
      () => state.hint({ deadlineS: wrong }),
      () => state.gen("a", { maxTokens: wrong }),
      () => state.gen("a", { temperature: wrong }),
    ]) {
      assert.throws(attempt, (error: Error) => {
        assert.equal((error as { code?: string }).code, "bad_argument");
        assert.match(error.message, param);
        return true;
      });
    }
  }
  assert.throws(() => session.submit(graph), { code: "bad_argument", message: /output_tokens/ });
  state.limit({ deadlineS: 1.5 }).text("null");
  await settle(server);
  const kinds = server.accepted.map(({ op }) => op).filter((op) => op !== "begin" && op !== "end");
  assert.deepEqual(kinds, ["open", "limit", "text"]);
  await Promise.all([session.close(), settle(server)]);
});

test("f37: a turn that cannot be sent as a whole is not begun", async () => {
  const server = new FakeServer(texts);
  const connecting = connect({ url: "ws://fake", WebSocket: server.WebSocket, maxBufferedBytes: 1000 });
  await settle(server);
  const session = await connecting;
  const state = session.state();
  let numSeen = 0;
  const sentKinds = async (): Promise<string[]> => {
    await settle(server);
    server.send(); // acknowledges
    await settle(server);
    const found = server.accepted.slice(numSeen).map(({ op }) => op);
    numSeen += found.length;
    return found;
  };
  assert.throws(() => state.user("half a pair: \ud83d"), { code: "bad_argument" });
  assert.throws(() => state.user("a", "b".repeat(900)), { code: "backlog_full" });
  assert.throws(() => state.tool({ name: "tool" }, "c".repeat(900)), { code: "backlog_full" });
  state.user("a");
  assert.throws(() => state.gen("answer", { regex: "\udc00" }), { code: "bad_argument" });
  assert.throws(() => state.select("answer", ["d".repeat(900)]), { code: "backlog_full" });
  state.gen("answer");
  state.user("e");
  const expected = ["begin", "text", "end", "begin", "gen", "end", "begin", "text", "end"];
  assert.deepEqual(await sentKinds(), ["open", ...expected]);
  const picture = await image(`https://host/${"g".repeat(400)}`);
  assert.throws(() => state.user("f".repeat(600), picture), { code: "backlog_full" });
  state.assistant("h");
  assert.deepEqual(await sentKinds(), ["begin", "text", "end"]);
  await Promise.all([session.close(), settle(server)]);
});

test("f37: what the server has acknowledged takes no memory", { timeout: 20_000 }, () => {
  setFlagsFromString("--expose-gc");
  const collect = runInNewContext("gc") as () => void;
  const heapSize = (): number => {
    collect();
    return process.memoryUsage().heapUsed;
  };
  const queue = new OpQueue(4_000_000, 64_000_000);
  const before = heapSize();
  const recorded: Op[] = []; // a recording keeps the ops, of 51 MB
  for (let number = 1; number <= 60; number++) {
    const op: Op = { op: "upload", source: "s", size: 1, at: 0, data: String(number).repeat(1_000_000) };
    if (number <= 30) recorded.push(op);
    queue.add(op);
    queue.nextFrame();
    queue.acknowledge(number);
  }
  assert.equal(recorded.length, 30);
  assert.ok(heapSize() - before < 75_000_000);
});

test("f37: a state that was closed before its last variable ended is not kept", { timeout: 20_000 }, async () => {
  setFlagsFromString("--expose-gc");
  const collect = runInNewContext("gc") as () => void;
  const server = new FakeServer(new Map([["first", "1"], ["second", "2"]]));
  const session = await opened(server);
  const closed = (): [first: number, second: number, done: Promise<void>, state: WeakRef<State>] => {
    const state = session.state();
    const first = state.gen("first");
    const done = state.done();
    const second = state.gen("second");
    state.close();
    return [first.number, second.number, done, new WeakRef(state)];
  };
  const [first, second, done, state] = closed();
  await settle(server);
  server.send(...server.progress(first, 9), { event: "reached", state: 1, ticket: 1 });
  await settle(server);
  await done;
  server.send(...server.progress(second, 9));
  await settle(server);
  assert.ok(server.isEmpty);
  for (let round = 0; state.deref(); round++) {
    assert.ok(round < 100, "the session keeps it");
    await turn();
    collect();
  }
  await Promise.all([session.close(), settle(server)]);
});

test("what the server has not acknowledged has a limit", async () => {
  const server = new FakeServer(texts);
  const connecting = connect({ url: "ws://fake", WebSocket: server.WebSocket, maxBufferedBytes: 10_000 });
  await settle(server);
  const session = await connecting;
  const state = session.state();
  assert.throws(() => {
    for (;;) state.text("x".repeat(1000));
  }, { code: "backlog_full" });
  await settle(server);
  server.send(); // acknowledges
  await settle(server);
  state.text("x".repeat(1000));
  assert.throws(() => state.begin("tool", { name: "x".repeat(2_000_000) }), { code: "frame_too_large" });
  await Promise.all([session.close(), settle(server)]);
});
