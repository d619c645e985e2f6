import { describe, expect, it } from "vitest";
import { DECLARING } from "../../../clients/typescript/src/protocol";
import { endingOf, readFile } from "./file";
import { promptOf } from "./prompt";
import { RecordingReader, withForks, type Call, type Run } from "./recording";
import {
  barOf,
  collapsedAtFirst,
  endOf,
  nameOf,
  outcomeOf,
  pannedSpan,
  revealedSpan,
  rowsOf,
  spanBelow,
  visible,
  zoomedSpan,
} from "./layout";
import { SessionLog } from "./sessionLog";
import { factsOf, summaryOf } from "./words";
import text from "./tree_of_thought.jsonl?raw";

/** A real recording of examples/tree_of_thought.py with two levels of two branches; `agentflow replay` shows it as
 * 9 states and 8 variables. */
const LINES = text.trimEnd().split("\n");

const fileOf = (content: string, name = "run.jsonl"): File => new File([content], name);
const read = (lines: readonly object[]): RecordingReader => {
  const reader = new RecordingReader();
  for (const line of [{ recording: 2, model: "m", models: {} }, ...lines]) reader.read(line);
  reader.finish();
  return reader;
};
const callsOf = (runs: readonly Run[]): Call[] =>
  runs.flatMap((run) => run.states.flatMap((state) => state.calls));
const gen = (state: number, variable: number, name = "x") => ({
  op: "gen",
  state,
  var: variable,
  name,
  params: {},
});
const value = (variable: number, more: object = {}) => ({
  event: "value",
  var: variable,
  at: 0,
  text: "t",
  finish_reason: "stop",
  usage: { prompt_tokens: 4, cached_tokens: 2, output_tokens: 1 },
  ...more,
});

describe("the prompt of a call", () => {
  it("has what stands before it, in its state and in those that it was forked from", () => {
    const reader = read([
      { at_s: 0, sent: { op: "open", state: 1 } },
      { at_s: 0, sent: { op: "begin", state: 1, role: "user" } },
      { at_s: 0, sent: { op: "text", state: 1, parts: ["Name a city."] } },
      { at_s: 0, sent: { op: "end", state: 1 } },
      { at_s: 0, sent: { op: "begin", state: 1, role: "assistant" } },
      { at_s: 0, sent: gen(1, 1, "city") },
      { at_s: 0, sent: { op: "end", state: 1 } },
      { at_s: 0, sent: { op: "fork", state: 1, children: [2] } },
      { at_s: 0, sent: { op: "text", state: 1, parts: ["not in the branch"] } },
      { at_s: 0, sent: { op: "text", state: 2, parts: ["Is ", { var: 1, transforms: [["strip"]] }, " big? "] } },
      { at_s: 0, sent: gen(2, 2, "size") },
      { at_s: 1, received: value(1, { text: " Oslo " }) },
      { at_s: 2, received: value(2) },
    ]);
    const [city, size] = callsOf(reader.runs);
    expect(promptOf(city!, reader)).toEqual([
      { role: "user", text: "Name a city." },
      { role: "assistant", text: "" },
    ]);
    expect(promptOf(size!, reader)).toEqual([
      { role: "user", text: "Name a city." },
      { role: "assistant", text: " Oslo " },
      { role: null, text: "Is Oslo big? " },
    ]);
  });

  it("has the messages of a conversation", () => {
    const messages = [
      { role: "user", content: "How cold is it?" },
      { role: "assistant", content: "", tool_calls: [{ id: "1", name: "weather", arguments: "{}" }] },
      { role: "tool", content: "4", tool_call_id: "1" },
    ];
    const reader = read([
      { at_s: 0, sent: { op: "open", state: 1 } },
      { at_s: 0, sent: { op: "converse", state: 1, conversation: { messages } } },
      { at_s: 0, sent: gen(1, 1) },
    ]);
    expect(promptOf(callsOf(reader.runs)[0]!, reader)).toEqual([
      { role: "user", text: "How cold is it?" },
      { role: "assistant", text: "weather({})" },
      { role: "tool", text: "4" },
      { role: "assistant", text: "" },
    ]);
  });

  it("f37: continues the last message of a conversation, if it is the assistant's", () => {
    const messages = [{ role: "user", content: "Name a city." }, { role: "assistant", content: "It is " }];
    const reader = read([
      { at_s: 0, sent: { op: "open", state: 1 } },
      { at_s: 0, sent: { op: "converse", state: 1, conversation: { messages } } },
      { at_s: 0, sent: { op: "text", state: 1, parts: ["called "] } },
      { at_s: 0, sent: gen(1, 1) },
    ]);
    expect(promptOf(callsOf(reader.runs)[0]!, reader)).toEqual([
      { role: "user", text: "Name a city." },
      { role: "assistant", text: "It is called " },
    ]);
  });

  it("marks where images and videos stand", () => {
    const image = { source: "https://example.com/a.png" };
    const images = [{ at: 2, image }, { at: 99, image, video: true }, { at: 1, image: "wrong" }];
    const reader = read([
      { at_s: 0, sent: { op: "open", state: 1 } },
      { at_s: 0, sent: { op: "converse", state: 1, conversation: { messages: [{ role: "user", content: "😀 a", images }] } } },
      { at_s: 0, sent: gen(1, 1) },
      { at_s: 0, sent: { op: "upload", source: "sha256:00", size: 8, at: 0, data: "" } },
      { at_s: 0, sent: { op: "open", state: 2 } },
      { at_s: 0, sent: { op: "begin", state: 2, role: "user" } },
      { at_s: 0, sent: { op: "text", state: 2, parts: ["See "] } },
      { at_s: 0, sent: { op: "image", state: 2, source: "sha256:00" } },
      { at_s: 0, sent: { op: "text", state: 2, parts: [" and "] } },
      { at_s: 0, sent: { op: "video", state: 2, source: "sha256:11", num_frames: 8 } },
      { at_s: 0, sent: { op: "end", state: 2 } },
      { at_s: 0, sent: gen(2, 2) },
    ]);
    expect(reader.numUnread).toBe(0);
    const [first, second] = callsOf(reader.runs);
    expect(promptOf(first!, reader)[0]).toEqual({ role: "user", text: "😀 a", media: [{ at: 3, kind: "image" }, { at: 4, kind: "video" }, { at: 4, kind: "image" }] });
    const media = [{ at: 4, kind: "image" }, { at: 9, kind: "video" }];
    expect(promptOf(second!, reader)).toEqual([{ role: "user", text: "See  and ", media }]);
  });

  it("counts the variables of a graph from its base", () => {
    const ops = [
      { op: "open", state: 1 },
      { op: "text", state: 1, parts: ["Say. "] },
      gen(1, 1),
      { op: "text", state: 1, parts: [" And? ", { var: 1 }] },
      gen(1, 2),
    ];
    const reader = read([
      { at_s: 0, sent: { op: "submit", state: 11, ops } },
      { at_s: 1, received: value(11, { text: "A" }) },
    ]);
    expect(promptOf(callsOf(reader.runs)[1]!, reader)).toEqual([{ role: null, text: "Say. A And? A" }]);
  });
});

describe("the facts about a call", () => {
  it("say how many tokens were not cached and why, if there is a reason", () => {
    const usage = { prompt_tokens: 1000, cached_tokens: 300, output_tokens: 1 };
    const reader = read([
      { at_s: 0, sent: { op: "open", state: 1 } },
      { at_s: 0, sent: gen(1, 1) },
      { at_s: 0, sent: gen(1, 2) },
      { at_s: 1, received: value(1, { usage: { ...usage, miss_reason: "tools_changed" } }) },
      { at_s: 2, received: value(2, { usage: { ...usage, miss_reason: "" } }) },
    ]);
    const [missed, other] = callsOf(reader.runs).map((call) => Object.fromEntries(factsOf(call, 2)));
    expect(missed!["Not cached"]).toBe("700 tokens: the tools changed");
    expect(other).not.toHaveProperty("Not cached");
  });
});

describe("a call that failed because another was cancelled", () => {
  it("is cancelled", () => {
    const cause = { code: "cancelled", message: "it was cancelled" };
    const reader = read([
      { at_s: 0, sent: { op: "open", state: 1 } },
      { at_s: 0, sent: gen(1, 1) },
      { at_s: 1, received: { event: "varfailed", var: 1, error: { code: "variable_failed", message: "", cause } } },
    ]);
    expect(outcomeOf(callsOf(reader.runs)[0]!)).toBe("cancelled");
  });
});

describe("a real recording", () => {
  it("has the runs, states, calls and sums that `agentflow replay` shows", async () => {
    const { reader, problem, isRecording } = await readFile(fileOf(text));
    expect({ problem, isRecording, ending: reader.ending, unread: reader.numUnread }).toEqual({
      problem: null,
      isRecording: true,
      ending: "complete",
      unread: 0,
    });
    expect(reader.totals).toMatchObject({
      states: 9,
      calls: 8,
      promptTokens: 728,
      cachedTokens: 632,
      outputTokens: 72,
    });
    const rows = rowsOf(reader.runs, new Set());
    expect(rows.map((row) => nameOf(row.state))).toEqual([
      "run 0",
      "(0)",
      "(0, 0)",
      "(1)",
      "(1, 0)",
      "(1, 1)",
      "(1, 1, 0)",
      "(1, 2)",
      "(1, 2, 0)",
    ]);
    expect(rows.filter((row) => row.state.isCancelled).map((row) => nameOf(row.state))).toEqual([
      "(0)",
      "(0, 0)",
      "(1, 2)",
      "(1, 2, 0)",
    ]);
    expect(callsOf(reader.runs).map(outcomeOf)).toEqual(Array(8).fill("done"));
  });

  it("says when each call could begin: a judge only after its thought", async () => {
    const { reader } = await readFile(fileOf(text));
    const [thought] = reader.runs[0]!.states[1]!.calls;
    const [verdict] = [...withForks(reader.runs[0]!.states[1]!)][1]!.calls;
    expect(verdict!.sentS).toBeLessThan(thought!.endS!);
    expect(verdict!.readyS).toBe(thought!.endS);
    expect(thought!.text).toMatch(/^ It was so /);
  });

  it("is the same in slices of any size", async () => {
    let [pauses, last] = [0, 0];
    const sliced = await readFile(fileOf(text), {
      sliceMs: 0,
      pause: async () => void (pauses += 1),
      onProgress: (share) => (last = share),
    });
    expect(pauses).toBeGreaterThanOrEqual(LINES.length);
    expect(last).toBe(1);
    const whole = await readFile(fileOf(text));
    expect(sliced.reader.totals).toEqual(whole.reader.totals);
  });

  it("can be aborted", async () => {
    const abort = new AbortController();
    const reading = readFile(fileOf(text), {
      sliceMs: 0,
      pause: async () => abort.abort(),
      signal: abort.signal,
    });
    await expect(reading).rejects.toThrow();
  });

  it("is read as far as it goes wherever it was cut, and never contradicts the whole", async () => {
    const whole = callsOf((await readFile(fileOf(text))).reader.runs);
    for (let length = 0; length < text.length - 60; length += 397) {
      const { reader, problem } = await readFile(fileOf(text.slice(0, length)));
      expect(problem, `after ${length} characters`).toBeTruthy();
      for (const call of callsOf(reader.runs)) {
        const same = whole.find(({ number }) => number === call.number)!;
        expect(call.name).toBe(same.name);
        expect(same.text.startsWith(call.text)).toBe(true);
      }
    }
  });
});

describe("files with faults", () => {
  const entries = LINES.slice(1);

  it.each([
    ["no line at all", ""],
    ["something else", "PK\u0003\u0004 not JSON\nmore\n"],
    ["other JSON lines", '{"a":1}\n[2]\nnull\n'],
    ["one long line", "x".repeat(600_000)],
  ])("are no recordings: %s", async (_, content) => {
    const read = await readFile(fileOf(content));
    expect(read.isRecording).toBe(false);
    expect(read.problem).toContain("run.jsonl");
    expect(read.reader.runs).toEqual([]);
  });

  it("are not read to the end if nothing in them is a line of a recording", async () => {
    const { reader } = await readFile(fileOf(`${"no".repeat(50)}\n`.repeat(10_000)));
    expect(reader.numUnread).toBeLessThan(5_000);
  });

  it("of another version are shown as far as they are understood", async () => {
    const header = { ...(JSON.parse(LINES[0]!) as object), recording: 7 };
    const { reader, problem } = await readFile(fileOf([JSON.stringify(header), ...entries, ""].join("\n")));
    expect(problem).toContain("version 7");
    expect(reader.totals.states).toBe(9);
  });

  it("lose no more than the lines that are damaged", async () => {
    const lines = [...LINES];
    const at = lines.findIndex((line) => line.includes('"delta"'));
    lines[at] = lines[at]!.slice(0, 20);
    const { reader, problem } = await readFile(fileOf(`${lines.join("\n")}\n`));
    expect([reader.numUnread, reader.firstUnread]).toEqual([1, at + 1]);
    expect(problem).toContain(String(at + 1));
    expect(reader.totals.calls).toBe(8);
  });

  it("without a header, or without an ending, say so", async () => {
    const headless = await readFile(fileOf(`${entries.join("\n")}\n`));
    expect(headless.isRecording).toBe(true);
    expect(headless.problem).toContain("header");
    const endless = await readFile(fileOf(`${LINES.slice(0, -1).join("\n")}\n`));
    expect(endless.reader.ending).toBeNull();
    expect(endless.problem).toBeTruthy();
  });

  it("say how the session ended", () => {
    expect(endingOf(read([{ at_s: 1, ending: "complete" }]))).toBeNull();
    expect(endingOf(read([{ at_s: 1, ending: "failed" }]))).toBeTruthy();
    expect(endingOf(read([{ at_s: 1, lost: { code: "server_lost", message: "gone" } }]))).toContain("gone");
  });

  it.each([
    { at_s: 1, sent: { op: "fork", state: 9, children: [10] } },
    { at_s: 1, sent: { op: "fork", state: 1, children: [1] } },
    { at_s: 1, sent: { op: "gen", state: 1, var: "x" } },
    { at_s: 1, received: { event: "value", var: 99 } },
    { at_s: -1, ending: "complete" },
    { at_s: 1 },
    { sent: { op: "open", state: 2 } },
    null,
    [],
    3,
    "x",
  ])("have lines that contradict others, which are left out: %j", (line) => {
    const reader = read([
      { at_s: 0, sent: { op: "open", state: 1 } },
      line as object,
      { at_s: 2, sent: gen(1, 2) },
    ]);
    expect([reader.numUnread, reader.firstUnread]).toEqual([1, 3]);
    expect(callsOf(reader.runs)).toHaveLength(1);
  });
});

describe("the lines", () => {
  const open = { at_s: 0, sent: { op: "open", state: 1, program: "p" } };

  it("continue texts at code points", () => {
    const delta = (at: number, text: string, atS: number) => ({
      at_s: atS,
      received: { event: "delta", var: 2, at, text },
    });
    const reader = read([
      open,
      { at_s: 0, sent: gen(1, 2) },
      delta(0, "a😀", 1),
      delta(2, "bc", 2),
      delta(3, "d", 3),
      { at_s: 4, received: value(2, { at: 4, text: "!" }) },
    ]);
    expect(callsOf(reader.runs)[0]).toMatchObject({
      text: "a😀bd!",
      firstS: 1,
      endS: 4,
      finishReason: "stop",
    });
  });

  it("number the states and variables of a graph from its own", () => {
    const ops = [
      { op: "open", state: 1, program: "graph", label: "essays" },
      { op: "fork", state: 1, children: [2, 3] },
      gen(2, 4, "a"),
      gen(3, 5, "b"),
      { op: "text", state: 1, parts: [{ op: "ref", var: 5 }] },
      gen(1, 6, "c"),
    ];
    const reader = read([
      { at_s: 0, sent: { op: "submit", state: 11, ops, outputs: [4, 5, 6] } },
      { at_s: 2, received: value(14) },
      { at_s: 3, received: value(15) },
      { at_s: 5, received: value(16) },
    ]);
    expect(reader.numUnread).toBe(0);
    expect(
      callsOf(reader.runs).map((call) => [call.name, nameOf(call.state), call.readyS, call.endS]),
    ).toEqual([
      ["c", "run 0: essays", 3, 5],
      ["a", "(0)", 0, 2],
      ["b", "(1)", 0, 3],
    ]);
  });

  it.each([...DECLARING])("have a call for a variable of the kind %s", (kind) => {
    const reader = read([
      open,
      { at_s: 0, sent: { op: kind, state: 1, var: 2, name: "x" } },
      { at_s: 1, received: value(2) },
    ]);
    expect(reader.numUnread).toBe(0);
    expect(callsOf(reader.runs)).toMatchObject([{ kind, name: "x", endS: 1 }]);
  });

  it("may be of no state", () => {
    const reader = read([
      open,
      { at_s: 0, sent: { op: "upload", source: "sha256:00", size: 8, at: 0, data: "" } },
      { at_s: 0, sent: { op: "release", source: "sha256:00" } },
      { at_s: 0, sent: gen(1, 2) },
      { at_s: 0, sent: { op: "want", var: 2, how: "stream" } },
      { at_s: 0, sent: { op: "watch", ticket: 1, interval_s: 1 } },
    ]);
    expect(reader.numUnread).toBe(0);
  });

  it("of a decision are of a call to the model that writes nothing into the state", () => {
    const reader = read([
      open,
      { at_s: 0, sent: { op: "text", state: 1, parts: ["Spam?"] } },
      { at_s: 0, sent: { op: "decide", state: 1, var: 2, name: "spam", questions: [] } },
      { at_s: 1, received: value(2) },
      { at_s: 1, sent: gen(1, 3) },
    ]);
    const [decision, next] = callsOf(reader.runs);
    expect(rowsOf(reader.runs, new Set())[0]!.calls).toEqual([decision, next]);
    expect(reader.totals).toMatchObject({ calls: 2, promptTokens: 4 });
    expect(promptOf(next!, reader)).toEqual([{ role: null, text: "Spam?" }]);
  });

  it("tell failures from cancellations and from calls without an end", () => {
    const fail = (variable: number, code: string) => ({
      at_s: 1,
      received: { event: "varfailed", var: variable, error: { code, message: "m" } },
    });
    const reader = read([
      open,
      ...[2, 3, 4].map((number) => ({ at_s: 0, sent: gen(1, number) })),
      { at_s: 0, sent: { op: "fork", state: 1, children: [5] } },
      { at_s: 0, sent: gen(5, 6) },
      { at_s: 1, sent: { op: "cancel", state: 5 } },
      fail(2, "cancelled"),
      fail(3, "engine_failed"),
    ]);
    expect(callsOf(reader.runs).map(outcomeOf)).toEqual(["cancelled", "failed", "open", "cancelled"]);
  });

  it("f37: tell runs whose program failed from cancelled ones", () => {
    const cancelled = { event: "statefailed", state: 1, error: { code: "cancelled", message: "m" } };
    const cancel = (failure?: object) => [
      open,
      { at_s: 0, sent: { op: "text", state: 1, parts: ["Hello"] } },
      { at_s: 0, sent: { op: "fork", state: 1, children: [2] } },
      { at_s: 1, sent: { op: "cancel", state: 1, ...(failure && { failure }) } },
      { at_s: 1, received: cancelled },
      { at_s: 1, received: { ...cancelled, state: 2 } },
    ];
    const shown = (failure?: object) => read(cancel(failure)).runs[0]!.states.map((one) => [endOf(one), summaryOf(one)]);
    expect(shown()).toEqual([["cancelled", "Hello"], ["cancelled", ""]]);
    expect(shown({ type: "KeyError", message: "'a'\nb" })).toEqual([["failed", "KeyError: 'a' b"], ["cancelled", ""]]);
    expect(shown({ type: "Stop" })[0]).toEqual(["failed", "Stop"]);
    expect(shown({ type: 5, message: null })[0]).toEqual(["failed", ""]);
  });

  it("of a chain of 20,000 forks make as many rows", () => {
    const forks = Array.from({ length: 20_000 }, (_, i) => ({
      at_s: i,
      sent: { op: "fork", state: i + 1, children: [i + 2] },
    }));
    const reader = read([open, ...forks]);
    expect(rowsOf(reader.runs, new Set())).toHaveLength(20_001);
  });
});

describe("the log of a session", () => {
  it("is a recording, complete if nothing runs any more", async () => {
    const log = new SessionLog();
    for (const line of LINES.slice(0, -1)) log.record(JSON.parse(line) as object);
    const reader = new RecordingReader();
    for (const line of log.lines.slice(0, 40)) reader.read(line);
    expect(reader.isIdle).toBe(false);
    for (const line of log.lines.slice(40)) reader.read(line);
    expect(reader.isIdle).toBe(true);
    const saved = await readFile(new File([log.toBlob(reader.isIdle)], "saved.jsonl"));
    expect(saved).toMatchObject({ problem: null, reader: { ending: "complete" } });
    const early = await readFile(new File([log.toBlob(false)], "saved.jsonl"));
    expect(early.reader.ending).toBeNull();
  });
});

describe("the timeline", () => {
  const call = (readyS: number, firstS: number | null, endS: number | null) =>
    ({ readyS, firstS, endS }) as Call;
  const whole = { beginS: 0, toS: 10 };

  it("hides the forks of collapsed states", async () => {
    const { reader } = await readFile(fileOf(text));
    const rows = rowsOf(reader.runs, new Set([reader.runs[0]!.states[2]!]));
    expect(rows.map((row) => [nameOf(row.state), row.isOpen, row.isLast, row.guides])).toEqual([
      ["run 0", true, true, []],
      ["(0)", true, false, []],
      ["(0, 0)", true, true, [true]],
      ["(1)", false, true, []],
    ]);
    expect(rows.map((row) => row.calls.length)).toEqual([0, 1, 1, 6]); // those of its forks, too
    expect(reader.span.toS).toBeGreaterThan(1.6);
    expect(new RecordingReader().span).toEqual({ beginS: 0, toS: 1 });
  });

  it("collapses runs at first where there are many states", async () => {
    const { reader } = await readFile(fileOf(text));
    expect(collapsedAtFirst(reader.runs).size).toBe(0);
    expect(collapsedAtFirst(Array<Run>(30).fill(reader.runs[0]!)).size).toBe(1);
  });

  it("sums the calls below a collapsed state where they are many", () => {
    const ends = (count: number) => Array.from({ length: count }, (_, i) => ({ at_s: 9, received: value(100 + i) }));
    const gens = (count: number) => Array.from({ length: count }, (_, i) => ({ at_s: 2, sent: gen(2, 100 + i) }));
    const begin = [
      { at_s: 1, sent: { op: "open", state: 1 } },
      { at_s: 1, sent: { op: "fork", state: 1, children: [2] } },
    ];
    const rowOf = (count: number) => {
      const { runs } = read([...begin, ...gens(count), ...ends(count)]);
      return rowsOf(runs, new Set([runs[0]!.root]))[0]!;
    };
    expect([rowOf(24).calls.length, rowOf(24).sums]).toEqual([24, null]);
    const [{ usage }] = rowOf(1).calls as [Call];
    expect([rowOf(25).calls.length, rowOf(25).sums]).toEqual([
      0,
      {
        calls: 25,
        promptTokens: 25 * (usage?.prompt_tokens ?? 0),
        cachedTokens: 25 * (usage?.cached_tokens ?? 0),
        readyS: 2,
        firstS: 2,
        endS: 9,
      },
    ]);
  });

  it("opens as many levels of a long run as fit", () => {
    const forks = (numbers: readonly number[], each: number, from: number): object[] =>
      numbers.map((state, i) => ({
        at_s: i,
        sent: { op: "fork", state, children: Array.from({ length: each }, (_, j) => from + i * each + j) },
      }));
    const open = { at_s: 0, sent: { op: "open", state: 1 } };
    const numbers = (from: number, count: number): number[] => Array.from({ length: count }, (_, i) => from + i);
    const tree = read([open, ...forks([1], 10, 2), ...forks(numbers(2, 10), 10, 12), ...forks(numbers(12, 100), 2, 112)]);
    expect(rowsOf(tree.runs, collapsedAtFirst(tree.runs))).toHaveLength(1 + 10 + 100);
    const wide = read([open, ...forks([1], 150_000, 2)]);
    expect(rowsOf(wide.runs, collapsedAtFirst(wide.runs))).toHaveLength(1);
    expect(spanBelow(wide.runs[0]!.root, wide.span)).toEqual(wide.span);
    const chain = read([open, ...numbers(1, 20_000).map((state) => forks([state], 1, state + 1)[0]!)]);
    expect(rowsOf(chain.runs, collapsedAtFirst(chain.runs))).toHaveLength(200);
    expect(nameOf(chain.runs[0]!.states.at(-1)!)).toMatch(/^\(…(, 0){23}\)$/);
  });

  it("zooms to a state and its forks", async () => {
    const { reader } = await readFile(fileOf(text));
    const of = (index: number) => spanBelow(reader.runs[0]!.states[index]!, reader.span);
    expect(of(0)).toEqual(reader.span);
    expect(of(5).beginS).toBeGreaterThan(0.8);
  });

  it("draws a call from when it could begin to its end, with its first text between", () => {
    expect(barOf(call(2, 3, 6), whole, 10)).toEqual({
      left: 0.2,
      width: 0.4,
      first: 0.25,
      isCutLeft: false,
      isCutRight: false,
    });
    expect(barOf(call(2, 3, 6), { beginS: 4, toS: 5 }, 10)).toEqual({
      left: 0,
      width: 1,
      first: 0,
      isCutLeft: true,
      isCutRight: true,
    });
    expect(barOf(call(2, null, null), whole, 7)).toMatchObject({ width: 0.5, first: 1 });
    expect(barOf(call(2, 3, 4), { beginS: 5, toS: 6 }, 10)).toBeNull();
    expect(barOf(call(2, 2, 2), whole, 10)).toMatchObject({ width: 0, first: 0 });
  });

  it("zooms and pans inside the whole", () => {
    expect(zoomedSpan(whole, whole, 2, 5)).toEqual({ beginS: 2.5, toS: 7.5 });
    expect(zoomedSpan(whole, whole, 2, 0)).toEqual({ beginS: 0, toS: 5 });
    expect(zoomedSpan({ beginS: 4, toS: 6 }, whole, 0.01, 5)).toEqual(whole);
    expect(zoomedSpan(whole, whole, 1e9, 5).toS).toBeGreaterThan(5);
    expect(pannedSpan({ beginS: 4, toS: 6 }, whole, 100)).toEqual({ beginS: 8, toS: 10 });
    expect(revealedSpan({ beginS: 4, toS: 6 }, whole, call(4, 4, 5))).toEqual({ beginS: 4, toS: 6 });
    expect(revealedSpan({ beginS: 4, toS: 6 }, whole, call(8, 8, 9))).toEqual({ beginS: 7.5, toS: 9.5 });
    expect(revealedSpan({ beginS: 4, toS: 6 }, whole, call(1, 1, 9))).toEqual({ beginS: 1, toS: 3 });
  });

  it("shows only the rows near the window", () => {
    expect(visible(10_000, 20, 2000, 400)).toEqual([94, 126]);
    expect(visible(3, 20, 0, 400)).toEqual([0, 3]);
    expect(visible(3, 20, 9000, 400)).toEqual([3, 3]);
  });
});
