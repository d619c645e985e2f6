// The protocol counts Unicode code points, JavaScript UTF-16 code units: an emoji is one of the former and two
// of the latter.

/** The number of code points in the text. */
export function countCodePoints(text: string): number {
  let count = text.length;
  for (let index = 0; index < text.length - 1; index++) {
    if (isPair(text, index)) {
      count--;
      index++;
    }
  }
  return count;
}

/** The text without its first `count` code points. */
export function dropCodePoints(text: string, count: number): string {
  return text.slice(unitsOf(text, 0, count));
}

/** The first `count` code points of the text. */
export function takeCodePoints(text: string, count: number): string {
  return text.slice(0, unitsOf(text, 0, count));
}

/** The index of the code unit that is `count` code points after the one at `start`. */
function unitsOf(text: string, start: number, count: number): number {
  let index = start;
  for (; count > 0 && index < text.length; count--) index += isPair(text, index) ? 2 : 1;
  return index;
}

function isPair(text: string, index: number): boolean {
  const first = text.charCodeAt(index);
  if (first < 0xd800 || first > 0xdbff) return false;
  const second = text.charCodeAt(index + 1);
  return second >= 0xdc00 && second <= 0xdfff;
}

/**
 * Spans of `[position, length]` in code points, such as `Variable.forced`, as spans of `[start, end]` for
 * `text.slice`. The spans are in order and do not overlap.
 */
export function utf16Spans(
  text: string,
  spans: Iterable<readonly [at: number, length: number]>,
): [start: number, end: number][] {
  const found: [number, number][] = [];
  let index = 0;
  let position = 0;
  for (const [at, length] of spans) {
    const start = unitsOf(text, index, at - position);
    index = unitsOf(text, start, length);
    position = at + length;
    found.push([start, index]);
  }
  return found;
}

/** The text in parts of at most `size` code units that do not divide a code point. */
export function splitText(text: string, size: number): string[] {
  if (text.length <= size) return [text];
  const parts: string[] = [];
  for (let start = 0; start < text.length; ) {
    let end = Math.min(start + size, text.length);
    if (isPair(text, end - 1)) end--;
    parts.push(text.slice(start, end));
    start = end;
  }
  return parts;
}

/** The number of bytes of the text in UTF-8. */
export function utf8Length(text: string): number {
  let bytes = text.length;
  for (let index = 0; index < text.length; index++) {
    const unit = text.charCodeAt(index);
    if (unit >= 0x80) bytes++;
    if (unit >= 0x800 && (unit < 0xd800 || unit > 0xdfff)) bytes++;
  }
  return bytes; // a pair of units: 2 + 1 + 1
}
