// The prompt of a call, put together from the ops of its state and of those that it was forked from.
import type { Call, Piece, RecordingReader } from "./recording";
import { textOf } from "./words";

/** An image or a video, before a character of a text. */
export interface Placed {
  readonly at: number;
  readonly kind: "image" | "video";
}

/** A turn of the prompt. `role`: null for text without turns. */
export interface PromptTurn {
  readonly role: string | null;
  readonly text: string;
  /** Its images and videos in the order of the text, if it has any. */
  readonly media?: readonly Placed[];
}

/** What the model had read when the call began: texts of the recording, and values as far as it has them. */
export function promptOf(call: Call, reader: RecordingReader): PromptTurn[] {
  const parts: (readonly Piece[])[] = [];
  let length = call.place;
  for (let state: Call["state"] | null = call.state; state !== null; state = state.parent) {
    parts.push(state.content.slice(0, length));
    length = state.contentBefore;
  }
  const turns: { role: string | null; text: string; media?: Placed[] }[] = [];
  let isOpen = false;
  for (const piece of parts.reverse().flat()) {
    if ("role" in piece) turns.push({ role: piece.role, text: "" });
    isOpen = "role" in piece || (isOpen && !("end" in piece));
    if ("role" in piece || "end" in piece) continue;
    let last = turns.at(-1);
    if (!last || !(isOpen || last.role === null)) turns.push((last = { role: null, text: "" }));
    const kind = "image" in piece ? "image" : "video";
    if ("image" in piece || "video" in piece) (last.media ??= []).push({ at: last.text.length, kind });
    else last.text += "text" in piece ? piece.text : valueOf(piece, reader);
  }
  return turns;
}

function valueOf({ variable, transforms }: Extract<Piece, { variable: number }>, reader: RecordingReader): string {
  const source = reader.callOf(variable);
  if (source === null || source.error !== null) return "…";
  return transforms.reduce<string>((text, transform) => transformed(text, transform, source.name), textOf(source));
}

/** The server has more transforms: of the others, only the names are shown. */
function transformed(text: string, transform: unknown, name: string): string {
  const [kind] = Array.isArray(transform) ? (transform as unknown[]) : [];
  switch (kind) {
    case "strip":
      return text.trim();
    case "lower":
      return text.toLowerCase();
    case "upper":
      return text.toUpperCase();
    case "first_line":
      return text.split("\n").map((line) => line.trim()).find(Boolean) ?? "";
    default:
      return `{${name}.${String(kind)}}`;
  }
}
