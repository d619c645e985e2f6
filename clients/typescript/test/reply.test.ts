// The notation of replies, cut anywhere.

import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { ReplySoFar, readReply, type Reply } from "../src/reply.js";

const string = fc.string({ unit: "binary" });
const part = fc.oneof(
  fc.record({ text: string }, { noNullPrototype: true }),
  fc.record({ id: string, name: string, arguments: string }, { noNullPrototype: true }),
);

/** What the parts say together. */
function expected(parts: readonly ({ text: string } | { id: string; name: string; arguments: string })[]): Reply {
  return {
    text: parts.map((one) => ("text" in one ? one.text : "")).join(""),
    toolCalls: parts.flatMap((one) => ("text" in one ? [] : [one])),
  };
}

test("a reply is the same wherever its notation is cut", () => {
  fc.assert(
    fc.property(fc.array(part), fc.array(fc.nat()), (parts, cuts) => {
      const notation = JSON.stringify(parts);
      const reader = new ReplySoFar();
      let start = 0;
      for (const cut of [...cuts.map((one) => one % (notation.length + 1)).sort((a, b) => a - b), notation.length]) {
        reader.push(notation.slice(start, cut));
        start = cut;
      }
      assert.ok(reader.isOver);
      assert.deepEqual(reader.now(), expected(parts));
      assert.deepEqual(readReply(notation), expected(parts));
    }),
  );
});

test("the reply so far has the whole characters that have arrived", () => {
  const reader = new ReplySoFar();
  reader.push('[{"text":"x \\u00');
  assert.deepEqual(reader.now(), { text: "x ", toolCalls: [] });
  reader.push('e9 \\');
  assert.deepEqual(reader.now(), { text: "x é ", toolCalls: [] });
  reader.push('n"},{"id":"c1","name":"weather","arguments":"{\\"city\\": \\"Os');
  assert.deepEqual(reader.now(), {
    text: "x é \n",
    toolCalls: [{ id: "c1", name: "weather", arguments: '{"city": "Os' }],
  });
  assert.ok(!reader.isOver);
});

for (const notation of ['[{"text":"a"}', "[", '[{"text":"\\x"}]', '[{"id":1,"name":"a","arguments":""}]', "{}"]) {
  test(`${notation} is no complete reply`, () => {
    assert.throws(() => readReply(notation), { code: "protocol_error" });
  });
}

test("reading takes time in proportion to the length", () => {
  const words = "a long reply with \"quotes\" and \\ ".repeat(20_000);
  const notation = JSON.stringify([{ text: words }]);
  const reader = new ReplySoFar();
  for (let start = 0; start < notation.length; start += 7) reader.push(notation.slice(start, start + 7));
  assert.equal(reader.now().text, words);
});
