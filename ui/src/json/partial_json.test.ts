import { describe, expect, test } from "vitest";
import { MAX_VALUES, readPartial, type JsonNode } from "./partial_json";

function valueOf(node: JsonNode | null): unknown {
  switch (node?.kind) {
    case "object":
      return Object.fromEntries(node.members.map(({ name, value }) => [name, valueOf(value)]));
    case "array":
      return node.items.map(valueOf);
    case "string":
      return node.text;
    case undefined:
      return undefined;
    default:
      return JSON.parse(node!.text);
  }
}

const VALUES = [
  { name: "Ada", born: 1815, tags: ["x", "y\n\"z\"", "\\"], inner: { ok: true, none: null, e: -1.5e3 }, empty: {}, list: [] },
  [[], [[1, 2], { a: [false] }]],
  { "ключ \u{1f600}": "שלום \u{1f600} \\u0041" },
];

describe("a value that is still growing", () => {
  test("f37: has no more values than a page can show", () => {
    const list = readPartial(`[${"1,".repeat(20_000)}`);
    expect(list).toMatchObject({ kind: "array", isCut: true, isDone: false });
    expect((valueOf(list) as unknown[]).length).toBe(MAX_VALUES - 1);
    const members = Array.from({ length: 3000 }, (_, index) => [`m${index}`, [index]]);
    const node = readPartial(JSON.stringify(Object.fromEntries(members)));
    expect(node).toMatchObject({ kind: "object", isDone: false });
    expect(JSON.stringify(node).match(/"isCut":true/g)).toHaveLength(1);
    expect(readPartial("[1,2]")).not.toHaveProperty("isCut");
  });

  test.each(VALUES.map((value) => [JSON.stringify(value)]))("complete, it is the value: %s", (source) => {
    expect(valueOf(readPartial(`${source} `))).toEqual(JSON.parse(source));
  });

  test.each(VALUES.map((value) => [JSON.stringify(value, null, 1)]))("every prefix can be read: %s", (source) => {
    for (let end = 0; end <= source.length; end++) {
      const node = readPartial(source.slice(0, end));
      if (end > 0) expect(node).not.toBeNull();
      if (end < source.length) expect(node?.isDone ?? false).toBe(false);
    }
  });

  test("an escape that is cut off is not shown", () => {
    for (const end of ['"a\\', '"a\\u', '"a\\u00']) expect(readPartial(end)).toMatchObject({ text: "a" });
    expect(readPartial('"a\\\\')).toMatchObject({ text: "a\\" });
  });

  test("text that is no JSON gives nothing, and deep nesting ends", () => {
    expect(readPartial("?")).toBeNull();
    expect(readPartial("[".repeat(10_000))).toMatchObject({ kind: "array" });
  });
});
