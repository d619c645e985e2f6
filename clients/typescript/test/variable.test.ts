// What a program sees of a variable: pieces from the start, one callback per frame, and its end.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { connect, type Session } from "../src/session.js";
import type { Variable } from "../src/variable.js";
import { FakeServer, settle, turn } from "./support/fake_server.js";

// The frames of a screen, which the tests show one by one.
let frames: (() => void)[] = [];
const screen = globalThis as { requestAnimationFrame?: unknown; cancelAnimationFrame?: unknown };

before(() => {
  screen.requestAnimationFrame = (callback: () => void) => frames.push(callback);
  screen.cancelAnimationFrame = () => {};
});

after(() => {
  delete screen.requestAnimationFrame;
  delete screen.cancelAnimationFrame;
});

function showFrame(): number {
  const due = frames;
  frames = [];
  for (const callback of due) callback();
  return due.length;
}

class Stage {
  readonly server: FakeServer;
  session!: Session;

  constructor(...texts: string[]) {
    this.server = new FakeServer(new Map(texts.map((text, index) => [`v${index}`, text])));
  }

  async open(): Promise<this> {
    const connecting = connect({ url: "ws://fake", WebSocket: this.server.WebSocket });
    await settle(this.server);
    this.session = await connecting;
    return this;
  }

  async gens(count: number): Promise<Variable[]> {
    const found = Array.from({ length: count }, (_, index) => this.session.state().gen(`v${index}`));
    await settle(this.server);
    return found;
  }

  async progress(size: number, ...variables: Variable[]): Promise<void> {
    this.server.send(...variables.flatMap(({ number }) => this.server.progress(number, size)));
    await settle(this.server);
  }

  async close(): Promise<void> {
    await Promise.all([this.session.close(), settle(this.server)]);
  }
}

test("pieces come from the start, also for a loop that begins late, and a slow loop gets larger ones", async () => {
  const stage = await new Stage("abcdefgh").open();
  const [variable] = (await stage.gens(1)) as [Variable];
  await stage.progress(2, variable);
  await stage.progress(2, variable);
  assert.equal(variable.text, "abcd");
  assert.equal(variable.done, false);
  const late: string[] = [];
  for await (const piece of variable) {
    late.push(piece);
    if (late.length === 1) {
      await stage.progress(1, variable);
      await stage.progress(1, variable);
    } else {
      await stage.progress(9, variable);
    }
  }
  assert.deepEqual(late, ["abcd", "ef", "gh"]);
  assert.equal(variable.finishReason, "eos");
  assert.equal(variable.usage?.output_tokens, 1);
  assert.deepEqual(await collected(variable), ["abcdefgh"]);
  assert.equal(await variable, "abcdefgh");
  await stage.close();
});

test("reasoning grows before the text, and comes again from its start after a connection broke", async () => {
  const stage = await new Stage("abc").open();
  const [variable] = (await stage.gens(1)) as [Variable];
  const think = async (reasoning: string, reasoning_at: number): Promise<void> => {
    stage.server.send({ event: "delta", var: variable.number, at: 0, text: "", reasoning, reasoning_at });
    await settle(stage.server);
  };
  let numChanges = 0;
  const leave = variable.onChange(() => numChanges++);
  await think("It is 🐻", 0);
  await think("?", 7);
  assert.equal(variable.reasoning, "It is 🐻?");
  await think("It is 🐻? Yes.", 0);
  assert.equal(variable.reasoning, "It is 🐻? Yes.");
  await think(" No.", 7);
  assert.equal(variable.reasoning, "It is 🐻 No.");
  assert.equal(showFrame(), 1);
  assert.equal(numChanges, 1);
  leave();
  await stage.progress(9, variable);
  assert.equal(await variable, "abc");
  assert.equal(variable.reasoning, ""); // the value is the server's last word
  await stage.close();
});

async function collected(pieces: AsyncIterable<string>): Promise<string[]> {
  const found: string[] = [];
  for await (const piece of pieces) found.push(piece);
  return found;
}

test("changes of many variables in one frame cost one callback each", async () => {
  const count = 200;
  const stage = await new Stage(...Array.from({ length: count }, (_, index) => `${index}`.repeat(40))).open();
  const variables = await stage.gens(count);
  const seen = variables.map(() => [] as string[]);
  variables.forEach((variable, index) => variable.onChange((_, added) => void seen[index]!.push(added)));
  for (let round = 0; round < 5; round++) await stage.progress(3, ...variables);
  assert.equal(frames.length, 1);
  showFrame();
  assert.ok(seen.every((added) => added.length === 1));
  await stage.progress(1000, ...variables);
  showFrame();
  assert.ok(seen.every((added) => added.length === 2));
  assert.deepEqual(seen.map((added) => added.join("")), await Promise.all(variables));
  assert.equal(showFrame(), 0);
  await stage.close();
});

test("a listener that comes late gets the text so far, and one that has left gets nothing", async () => {
  const stage = await new Stage("abc").open();
  const [variable] = (await stage.gens(1)) as [Variable];
  await stage.progress(2, variable);
  const seen: string[] = [];
  const leave = variable.onChange((_, added) => seen.push(added));
  showFrame();
  assert.deepEqual(seen, ["ab"]);
  await stage.progress(2, variable);
  leave();
  showFrame();
  assert.deepEqual(seen, ["ab"]);
  variable.onChange(({ done, text }, added) => seen.push(`${done} ${text} ${added}`));
  showFrame();
  assert.deepEqual(seen, ["ab", "true abc abc"]);
  await stage.close();
});

test("a failed variable throws its error with the causes, after the text that has arrived", async () => {
  const stage = await new Stage("abc").open();
  const [variable] = (await stage.gens(1)) as [Variable];
  await stage.progress(2, variable);
  stage.server.send({
    event: "varfailed",
    var: variable.number,
    error: {
      code: "run_failed",
      message: "'v0' was not generated",
      cause: { code: "prompt_too_long", message: "too long", state: 1, op: 2 },
    },
  });
  await settle(stage.server);
  const pieces: string[] = [];
  await assert.rejects(async () => {
    for await (const piece of variable) pieces.push(piece);
  }, { name: "RunFailed", code: "run_failed" });
  assert.deepEqual(pieces, ["ab"]);
  await assert.rejects(Promise.resolve(variable), (error: Error) => {
    assert.equal((error.cause as { code: string }).code, "prompt_too_long");
    assert.deepEqual((error.cause as { place: unknown }).place, [1, 2]);
    return true;
  });
  assert.equal(variable.text, "ab");
  assert.equal(variable.done, true);
  await stage.close();
});

test("a variable that is not awaited fails silently", async () => {
  const stage = await new Stage("abc").open();
  const [variable] = (await stage.gens(1)) as [Variable];
  await stage.close();
  await turn();
  assert.equal(variable.error?.code, "state_closed");
});

test("a reply is parsed while it is generated", async () => {
  const notation = '[{"text":"I look."},{"id":"c1","name":"weather","arguments":"{}"}]';
  const stage = await new Stage(notation).open();
  const [variable] = (await stage.gens(1)) as [Variable];
  await stage.progress(14, variable);
  assert.deepEqual(variable.reply, { text: "I lo", toolCalls: [] });
  await stage.progress(1000, variable);
  assert.deepEqual(variable.reply, {
    text: "I look.",
    toolCalls: [{ id: "c1", name: "weather", arguments: "{}" }],
  });
  await stage.close();
});

test("the server hears that a variable is read as it grows, or awaited although a text refers to it", async () => {
  const server = new FakeServer(new Map(["a", "b", "c"].map((name) => [name, "some text"])));
  const connecting = connect({ url: "ws://fake", WebSocket: server.WebSocket });
  await settle(server);
  const session = await connecting;
  const state = session.state();
  const [a, b, c] = ["a", "b", "c"].map((name) => state.gen(name)) as [Variable, Variable, Variable];
  state.text(a, b);
  const reading = (async () => {
    for await (const _ of a);
  })();
  const waiting = Promise.all([a, b, b, c]);
  await settle(server);
  server.send(...[a, b, c].flatMap((one) => server.progress(one.number, 100)));
  await settle(server);
  await Promise.all([reading, waiting]);
  for await (const _ of b); // it is complete
  await settle(server);
  const wants = server.accepted.filter(({ op }) => op === "want");
  assert.deepEqual(wants, [
    { op: "want", var: a.number, how: "stream" },
    { op: "want", var: b.number, how: "value" },
  ]);
  await Promise.all([session.close(), settle(server)]);
});
