// The notation of a reply: prose and tool calls as a JSON list, read while it grows
// (docs/reference/protocol.md, "Replies").

import { ProtocolError } from "./errors.js";
import type { CalledTool } from "./protocol.js";

/** A reply of the assistant: its prose, and its tool calls in their order. */
export interface Reply {
  text: string;
  toolCalls: CalledTool[];
}

/** A part of a reply that has arrived. `arguments` belong to the latest `call`. */
export type ReplyPiece =
  | { kind: "text"; text: string }
  | { kind: "call"; id: string; name: string }
  | { kind: "arguments"; text: string };

const TEXT = '{"text":"';
const ARGUMENTS = ',"arguments":"';

/** Reads pieces from the notation, incrementally. A piece of text may end anywhere, even within an escape. */
export class ReplyReader {
  #rest = "";
  #open: "text" | "arguments" | undefined;
  #hasBegun = false;
  #isOver = false;

  /** Whether the reply is complete. */
  get isOver(): boolean {
    return this.#isOver;
  }

  /** The pieces in `text`, which continues the notation. Throws `ProtocolError` if it is malformed. */
  push(text: string): ReplyPiece[] {
    this.#rest += text;
    const pieces: ReplyPiece[] = [];
    while (this.#open ? this.#readText(this.#open, pieces) : this.#readHead(pieces));
    return pieces;
  }

  /** Reads up to the text of the next part, or to the end. */
  #readHead(pieces: ReplyPiece[]): boolean {
    const rest = this.#rest;
    if (rest === (this.#hasBegun ? "]" : "[]")) {
      this.#rest = "";
      this.#isOver = true;
      return false;
    }
    if (rest.startsWith(TEXT, 1) || rest.startsWith(TEXT)) {
      this.#rest = rest.slice(rest.indexOf(TEXT) + TEXT.length);
      this.#open = "text";
    } else {
      const end = rest.indexOf(ARGUMENTS);
      if (end <= 0) return false;
      const { id, name } = parsed(`${rest.slice(1, end)}}`) as { id?: unknown; name?: unknown };
      if (typeof id !== "string" || typeof name !== "string") throw malformed(rest);
      pieces.push({ kind: "call", id, name });
      this.#rest = rest.slice(end + ARGUMENTS.length);
      this.#open = "arguments";
    }
    this.#hasBegun = true;
    return true;
  }

  /** Reads up to the quote that ends the text; keeps back an incomplete escape. */
  #readText(kind: "text" | "arguments", pieces: ReplyPiece[]): boolean {
    const rest = this.#rest;
    const end = endOfWholeChars(rest);
    const isOver = rest.startsWith('"}', end);
    if (end) pieces.push({ kind, text: parsed(`"${rest.slice(0, end)}"`) as string });
    this.#rest = rest.slice(isOver ? end + 2 : end);
    if (isOver) this.#open = undefined;
    return isOver;
  }
}

/** The index of the first quote, or of an escape that is incomplete. */
function endOfWholeChars(text: string): number {
  let index = 0;
  while (index < text.length) {
    const char = text[index];
    if (char === '"') break;
    const length = char !== "\\" ? 1 : text[index + 1] === "u" ? 6 : 2;
    if (index + length > text.length) break;
    index += length;
  }
  return index;
}

/** Collects a reply while its notation grows. */
export class ReplySoFar {
  readonly #reader = new ReplyReader();
  #text = "";
  #calls: CalledTool[] = [];

  /** Whether the reply is complete. */
  get isOver(): boolean {
    return this.#reader.isOver;
  }

  /** Reads more of the notation. Throws `ProtocolError` if it is malformed. */
  push(text: string): void {
    for (const piece of this.#reader.push(text)) {
      if (piece.kind === "text") this.#text += piece.text;
      else if (piece.kind === "call") this.#calls.push({ id: piece.id, name: piece.name, arguments: "" });
      else this.#calls.at(-1)!.arguments += piece.text;
    }
  }

  /** The reply so far. The last call's arguments may be incomplete. */
  now(): Reply {
    return { text: this.#text, toolCalls: this.#calls.map((call) => ({ ...call })) };
  }
}

/** The reply of a complete notation. Throws `ProtocolError` if it is malformed or incomplete. */
export function readReply(notation: string): Reply {
  const found = new ReplySoFar();
  found.push(notation);
  if (!found.isOver) throw malformed(notation);
  return found.now();
}

function parsed(json: string): unknown {
  try {
    return JSON.parse(json);
  } catch {
    throw malformed(json);
  }
}

function malformed(notation: string): ProtocolError {
  return new ProtocolError(`malformed or incomplete reply: ${JSON.stringify(notation.slice(0, 100))}`);
}
