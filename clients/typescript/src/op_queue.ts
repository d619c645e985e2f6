// The ops that the server has not acknowledged yet.

import { utf8Length } from "./code_points.js";
import { BacklogFull, BadArgument, FrameTooLarge, ProtocolError } from "./errors.js";
import type { Op } from "./protocol.js";

// An `ops` frame without its ops: field names and a number.
const FRAME_OVERHEAD_BYTES = 64;
// The server decodes a frame at once, so many small ops take several.
const USUAL_FRAME_BYTES = 128 * 1024;
// `JSON.stringify` escapes half a surrogate pair, which the server rejects.
const HALF_PAIR = /(?<!\\)(?:\\\\)*\\ud[89a-f]/;
// Small ops that ask, or that end something. The client sends most of them by itself, where no program could
// handle an error, and they are how a program waits for room.
const UNLIMITED: ReadonlySet<Op["op"]> = new Set([
  "await",
  "cancel",
  "close",
  "end",
  "getgraph",
  "getstats",
  "peek",
  "release",
  "unwatch",
  "want",
  "watch",
]);

interface EncodedOp {
  readonly text: string;
  readonly bytes: number;
}

const ACKNOWLEDGED: EncodedOp = { text: "", bytes: 0 };

/** Encoded ops, waiting or sent, oldest first, until the server acknowledges them. */
export class OpQueue {
  #ops: EncodedOp[] = [];
  #head = 0; // the index of the oldest
  #numSent = 0; // of those from `#head` on
  #numAcked = 0;
  #bytes = 0;
  readonly #checked = new WeakMap<Op, EncodedOp>(); // ops do not change

  /**
   * `frameBytes`: the largest frame. `maxBytes`: the largest sum of ops that are not acknowledged, to which ops that
   * ask or end something are added even if it is reached.
   */
  constructor(
    public frameBytes: number,
    private readonly maxBytes: number,
  ) {}

  /** The number of ops that are not acknowledged. */
  get length(): number {
    return this.#ops.length - this.#head;
  }

  /**
   * Adds an op and returns its number. Throws `FrameTooLarge`, `BadArgument` for a text that is not Unicode or a
   * number that is not finite, and `BacklogFull` if too much is not acknowledged for an op that adds something.
   */
  add(op: Op): number {
    const encoded = this.#encoded(op);
    this.#checkRoom([op]);
    this.#checked.delete(op); // a recording may keep the op
    this.#bytes += encoded.bytes;
    this.#ops.push(encoded);
    return this.#numAcked + this.length;
  }

  /** Throws what `add` would throw for one of these ops, which are added next, one after the other. */
  check(ops: readonly Op[]): void {
    this.#checkRoom(ops);
  }

  #checkRoom(ops: readonly Op[]): void {
    let bytes = this.#bytes;
    for (const op of ops) {
      bytes += this.#encoded(op).bytes;
      if (bytes > this.maxBytes && !UNLIMITED.has(op.op)) {
        throw new BacklogFull(
          `${op.op}: ${this.length} ops with ${this.#bytes} bytes are not acknowledged: await something first`,
        );
      }
    }
  }

  #encoded(op: Op): EncodedOp {
    const known = this.#checked.get(op);
    if (known) return known;
    const text = JSON.stringify(op);
    if (text.includes("\\ud") && HALF_PAIR.test(text)) {
      throw new BadArgument(`${op.op}: a text holds half a surrogate pair`);
    }
    if (text.includes("null")) rejectNotFinite(op);
    const bytes = utf8Length(text);
    if (bytes > this.frameBytes - FRAME_OVERHEAD_BYTES) {
      throw new FrameTooLarge(
        `${op.op}: the op takes ${bytes} bytes, and the server accepts frames of at most ${this.frameBytes}`,
      );
    }
    const encoded = { text, bytes };
    this.#checked.set(op, encoded);
    return encoded;
  }

  /** An `ops` frame with as many waiting ops as fit, which count as sent from now on. */
  nextFrame(): string | undefined {
    let next = this.#head + this.#numSent;
    if (next >= this.#ops.length) return undefined;
    const first = this.#numAcked + this.#numSent + 1;
    const start = next;
    let room = Math.min(this.frameBytes - FRAME_OVERHEAD_BYTES, USUAL_FRAME_BYTES);
    while (next < this.#ops.length && (next === start || room >= this.#ops[next]!.bytes)) {
      room -= this.#ops[next]!.bytes + 1;
      next++;
    }
    this.#numSent = next - this.#head;
    const ops = this.#ops.slice(start, next).map((op) => op.text);
    return `{"frame":"ops","first":${first},"ops":[${ops.join(",")}]}`;
  }

  /** The server has accepted the ops up to number `ack`. */
  acknowledge(ack: number): void {
    if (ack > this.#numAcked + this.#numSent) {
      throw new ProtocolError(
        `the server acknowledged op ${ack}, but only ${this.#numAcked + this.#numSent} were sent`,
      );
    }
    for (; this.#numAcked < ack; this.#numAcked++) {
      this.#bytes -= this.#ops[this.#head]!.bytes;
      this.#ops[this.#head] = ACKNOWLEDGED; // an image takes megabytes
      this.#head++;
      this.#numSent--;
    }
    if (this.#head > 1024 && this.#head * 2 > this.#ops.length) {
      this.#ops = this.#ops.slice(this.#head);
      this.#head = 0;
    }
  }

  /** Continues on a new connection: the ops after `ack` wait again. */
  resume(ack: number): void {
    // The ops that the broken connection has carried were sent, acknowledged or not.
    this.acknowledge(ack);
    this.#numSent = 0;
  }

  /** Whether the server has accepted the op with this number. */
  isAcknowledged(number: number): boolean {
    return number <= this.#numAcked;
  }
}

/** JSON has null instead of NaN and Infinity, and the server would take the field for one that is not set. */
function rejectNotFinite(op: Op): void {
  JSON.stringify(op, (key: string, value: unknown) => {
    if (typeof value === "number" && !Number.isFinite(value)) {
      throw new BadArgument(`${op.op}: ${key} is ${value}, which is no finite number: leave it out for no value`);
    }
    return value;
  });
}
