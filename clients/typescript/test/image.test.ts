// Images: what is accepted, their digests, and that a session sends each of them once and releases it.

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { test } from "node:test";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import fc from "fast-check";
import { bytesOfBase64, toBase64 } from "../src/base64.js";
import { Graph } from "../src/graph.js";
import { image } from "../src/image.js";
import type { Op, UploadOp } from "../src/protocol.js";
import { connect, type Session } from "../src/session.js";
import { plainSha256, sha256 } from "../src/sha256.js";
import { FakeServer, settle } from "./support/fake_server.js";

const timeout = 20_000;
const PNG = [0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a];
const png = (...rest: number[]): Uint8Array => Uint8Array.from([...PNG, ...rest]);
const digestOf = (data: Uint8Array): string => createHash("sha256").update(data).digest("hex");
const kindsOf = (ops: readonly Op[]): string[] => ops.map(({ op }) => op);

async function opened(server: FakeServer, record?: (line: object) => void): Promise<Session> {
  const connecting = connect({ url: "ws://fake", WebSocket: server.WebSocket, record });
  await settle(server);
  return connecting;
}

test("digests are SHA-256, with and without WebCrypto", { timeout }, async () => {
  await fc.assert(
    fc.asyncProperty(fc.uint8Array({ maxLength: 300 }), async (data) => {
      assert.equal(await plainSha256(data), digestOf(data));
      assert.equal(await sha256(data), digestOf(data));
    }),
  );
  const large = Uint8Array.from({ length: 2_500_001 }, (_, index) => index % 251);
  assert.equal(await plainSha256(large), digestOf(large));
});

test("base64 is that of Node.js", { timeout }, () => {
  fc.assert(
    fc.property(fc.uint8Array({ maxLength: 100 }), fc.nat(50_000), (data, numZeros) => {
      const bytes = Uint8Array.from([...new Uint8Array(numZeros), ...data]);
      assert.equal(toBase64(bytes), Buffer.from(bytes).toString("base64"));
      assert.deepEqual(bytesOfBase64(toBase64(bytes)), bytes);
    }),
    { numRuns: 30 },
  );
});

test("files, bytes and data URLs with the same bytes are one image", { timeout }, async () => {
  const bytes = png(1, 2, 3);
  const first = await image(new Blob([bytes as Uint8Array<ArrayBuffer>]));
  assert.equal(first.source, `sha256:${digestOf(bytes)}`);
  assert.equal(first.mediaType, "image/png");
  assert.deepEqual(first.data, bytes);
  const padded = Uint8Array.from([0, ...bytes, 0]);
  const given = [bytes, bytes.buffer as ArrayBuffer, padded.subarray(1, -1), Buffer.from(bytes), first.url, new URL(first.url)];
  for (const one of given) assert.equal(await image(one), first);
  bytes[9] = 99; // the image has a copy
  assert.equal(`sha256:${digestOf(first.data!)}`, first.source);
  const gif = await image(Buffer.from("GIF89a…"));
  const jpeg = await image(Uint8Array.of(0xff, 0xd8, 0xff, 0xe0));
  const webp = await image(Buffer.from("RIFF\0\0\0\0WEBP"));
  assert.deepEqual([gif, jpeg, webp].map(({ mediaType }) => mediaType), ["image/gif", "image/jpeg", "image/webp"]);
  const linked = await image("https://example.com/a.png");
  assert.deepEqual([linked.source, linked.url, linked.data], ["https://example.com/a.png", "https://example.com/a.png", undefined]);
});

for (const [name, given] of Object.entries({
  "another file": Buffer.from("<svg></svg>"),
  "an empty file": new Blob([]),
  "a file that is too large": new Blob([png() as Uint8Array<ArrayBuffer>, new Uint8Array(20_000_000)]),
  "another URL": "http://example.com/a.png",
  "a path": "a.png",
  "a data URL of a text": "data:text/plain;base64,aGk=",
  "a data URL without base64": "data:image/png,abc",
  "a damaged data URL": "data:image/png;base64,a%b",
  "no image": 7 as never,
})) {
  test(`${name} is rejected`, { timeout }, async () => {
    await assert.rejects(image(given), { code: "bad_argument" });
  });
}

test("an image is uploaded once, before the first op that refers to it", { timeout }, async () => {
  const server = new FakeServer(new Map([["a", "a"]]));
  const lines: object[] = [];
  const session = await opened(server, (line) => lines.push(line));
  const chart = await image(Buffer.concat([png(), new Uint8Array(800_000)]));
  const [left, right] = session.state().user("Look: ", chart, "!").fork(2);
  left!.tool({ name: "camera" }, chart);
  right!.begin("user").image(chart).image("https://example.com/a.png").end();
  const graph = new Graph();
  graph.root.user(chart);
  session.submit(graph);
  await settle(server);
  const uploads = server.accepted.filter((op): op is UploadOp => op.op === "upload");
  assert.ok(uploads.length > 1); // the server's frames are smaller than the image
  assert.deepEqual(Buffer.concat(uploads.map(({ data }) => Buffer.from(data, "base64"))), Buffer.from(chart.data!));
  let at = 0;
  for (const { source, size, at: begins, data } of uploads) {
    assert.deepEqual([source, size, begins], [chart.source, chart.data!.length, at]);
    at += Buffer.from(data, "base64").length;
  }
  const [before, after] = [kindsOf(server.accepted).indexOf("upload"), kindsOf(server.accepted).lastIndexOf("upload")];
  assert.deepEqual(kindsOf(server.accepted.slice(0, before)), ["open"]);
  assert.deepEqual(server.accepted.slice(after + 1, after + 6), [
    { op: "begin", state: 1, role: "user" },
    { op: "text", state: 1, parts: ["Look: "] },
    { op: "image", state: 1, source: chart.source },
    { op: "text", state: 1, parts: ["!"] },
    { op: "end", state: 1 },
  ]);
  const kept = lines.flatMap((line) => ("sent" in line ? [line.sent as Op] : [])).filter(({ op }) => op === "upload");
  assert.equal(kept.length, uploads.length);
  assert.ok(kept.every((op) => (op as UploadOp).data === "")); // a recording has no bytes
  await Promise.all([session.close(), settle(server)]);
});

test("an image that nothing uses is released, and sent again when it is used again", { timeout }, async () => {
  setFlagsFromString("--expose-gc");
  const collect = runInNewContext("gc") as () => void;
  const server = new FakeServer();
  const session = await opened(server);
  const countOf = (kind: string): number => kindsOf(server.accepted).filter((op) => op === kind).length;
  const use = async (): Promise<void> => {
    const state = session.state();
    state.user(await image(png(7)));
    state.close();
  };
  const open = session.state();
  open.user(await image(png(8))); // in the messages of an open state
  for (const round of [1, 2]) {
    await use();
    await use(); // perhaps another object, perhaps the same
    while (countOf("release") < round) {
      collect();
      await settle(server);
    }
    assert.deepEqual([countOf("upload"), countOf("release")], [round + 1, round]);
  }
  const released = server.accepted.filter((op) => op.op === "release").at(-1);
  assert.deepEqual(released, { op: "release", source: `sha256:${digestOf(png(7))}` });
  assert.ok((await open.messages())[0]!.content[0]);
  await Promise.all([session.close(), settle(server)]);
});

test("a conversation has images in its messages", { timeout }, async () => {
  const server = new FakeServer(new Map([["answer", "a cat"]]));
  const session = await opened(server);
  const photo = await image(png(4));
  const messages = [
    { role: "user", content: ["😀 ", photo, " What is it?", photo] },
    { role: "assistant", content: "A cat." },
    { role: "user", content: "Really?", images: [{ at: 0, image: { source: photo.source } }] },
  ];
  const state = session.state();
  state.converse(messages);
  await settle(server);
  assert.deepEqual(kindsOf(server.accepted), ["open", "upload", "converse"]);
  const placed = { source: photo.source };
  assert.deepEqual((server.accepted[2] as Extract<Op, { op: "converse" }>).conversation.messages, [
    { role: "user", content: "😀  What is it?", images: [{ at: 2, image: placed }, { at: 14, image: placed }] },
    { role: "assistant", content: "A cat." },
    { role: "user", content: "Really?", images: [{ at: 0, image: placed }] },
  ]);
  await Promise.all([session.close(), settle(server)]);
});

test("the messages of a state have its texts, values and images in order", { timeout }, async () => {
  const server = new FakeServer(new Map([["a", " one "], ["answer", '[{"text":"fine"}]']]));
  const session = await opened(server);
  const photo = await image(png(5));
  const root = session.state().system("Be brief.").user("See ", "this: ", photo);
  const a = root.gen("a");
  const [branch] = root.fork(1);
  root.user("not in the branch");
  branch!.text("outside").tool({ id: "c1", name: "camera" }, photo).begin("user").text(a, "!").end();
  const answer = branch!.gen("answer", { reply: true });
  const reading = branch!.messages();
  await settle(server);
  server.send(...[a, answer].flatMap((one) => server.progress(one.number, 100)));
  await settle(server);
  assert.deepEqual(await reading, [
    { role: "system", content: "Be brief." },
    { role: "user", content: ["See this: ", photo] },
    { role: "assistant", content: " one " },
    { role: "tool", tool_call_id: "c1", name: "camera", content: [photo] },
    { role: "user", content: " one !" },
    { role: "assistant", content: "fine" },
  ]);
  assert.equal((await root.messages()).at(-1)?.content, "not in the branch");
  await Promise.all([session.close(), settle(server)]);
});

test("images stand in turns of the user and of tools", { timeout }, async () => {
  const photo = await image(png(6));
  const { root } = new Graph();
  assert.throws(() => root.system(photo), { code: "bad_argument" });
  assert.throws(() => root.begin("assistant").image(photo), { code: "bad_argument" }); // the system's turn did not open
  assert.throws(() => root.end().image("ftp://example.com/a.png"), { code: "bad_argument" });
});
