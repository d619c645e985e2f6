// Positions in code points, compared with the iterator of strings; any text, half pairs too.

import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { countCodePoints, dropCodePoints, splitText, utf16Spans, utf8Length } from "../src/code_points.js";

const text = fc.oneof(fc.string({ unit: "binary" }), fc.string({ unit: "grapheme" }), utf16Text());

function utf16Text(): fc.Arbitrary<string> {
  const unit = fc.constantFrom(0x41, 0xe9, 0x20ac, 0xd83d, 0xde00, 0xdfff, 0xd800);
  return fc.array(unit).map((units) => String.fromCharCode(...units));
}

test("code points are counted and dropped as the iterator of strings does", () => {
  fc.assert(
    fc.property(text, fc.nat({ max: 20 }), (given, count) => {
      assert.equal(countCodePoints(given), [...given].length);
      assert.equal(dropCodePoints(given, count), [...given].slice(count).join(""));
    }),
  );
});

test("spans of code points select the same text in UTF-16", () => {
  fc.assert(
    fc.property(text, fc.array(fc.tuple(fc.nat({ max: 4 }), fc.nat({ max: 4 }))), (given, gaps) => {
      let at = 0;
      const spans = gaps.map(([gap, length]): [number, number] => {
        const span: [number, number] = [at + gap, length];
        at += gap + length;
        return span;
      });
      assert.deepEqual(
        utf16Spans(given, spans).map(([start, end]) => given.slice(start, end)),
        spans.map(([start, length]) => [...given].slice(start, start + length).join("")),
      );
    }),
  );
});

test("the parts of a text are short and divide no code point", () => {
  fc.assert(
    fc.property(fc.string({ unit: "binary" }), fc.integer({ min: 2, max: 9 }), (given, size) => {
      const parts = splitText(given, size);
      assert.equal(parts.join(""), given);
      for (const part of parts) {
        assert.ok(part.length <= size);
        assert.ok(!/^[\udc00-\udfff]/.test(part));
      }
    }),
  );
});

test("the length in UTF-8 is that of the encoder", () => {
  fc.assert(
    fc.property(fc.string({ unit: "binary" }), (given) => {
      assert.equal(utf8Length(given), new TextEncoder().encode(given).length);
    }),
  );
});
