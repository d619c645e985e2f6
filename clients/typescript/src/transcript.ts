// What was appended to a state, as messages.

import { countCodePoints } from "./code_points.js";
import { Image, knownFile } from "./image.js";
import type { BeginOp, Message, ToolChoice, ToolSpec } from "./protocol.js";
import type { Reference, Variable } from "./variable.js";

/** A turn of a conversation. */
export interface ChatMessage extends Omit<Message, "content"> {
  /** The text of the turn, or its texts and images in their order. */
  content: string | readonly (string | Image)[];
}

/** A part of a state's text, or a boundary of its turns. After `messages`, the assistant's turn is open. */
export type Entry =
  | string
  | Reference
  | Image
  | { readonly begin: BeginOp }
  | { readonly end: true }
  | { readonly replyOf: Variable }
  | { readonly tools: readonly ToolSpec[]; readonly choice: ToolChoice | undefined }
  | { readonly messages: readonly ChatMessage[] };

/** The entries of a state, after those of the state that it was forked from. */
export class Transcript {
  readonly #before: Transcript | undefined;
  readonly #numBefore: number;
  readonly #entries: Entry[] = [];

  constructor(before?: Transcript) {
    this.#before = before;
    this.#numBefore = before ? before.#entries.length : 0;
  }

  add(...entries: Entry[]): void {
    this.#entries.push(...entries);
  }

  /** Whether there is anything but tools. */
  get hasContent(): boolean {
    return this.entries().some((entry) => typeof entry !== "object" || !("tools" in entry));
  }

  /** All entries so far, from the first state on. */
  entries(): Entry[] {
    const parts: Entry[][] = [];
    let length = this.#entries.length;
    for (let one: Transcript | undefined = this; one; one = one.#before) {
      parts.push(one.#entries.slice(0, length));
      length = one.#numBefore;
    }
    return parts.reverse().flat();
  }
}

/** The turns of a state, without text outside them. `valueOf`: the text of a reference. */
export async function messagesOf(
  entries: readonly Entry[],
  valueOf: (part: Reference) => PromiseLike<string>,
): Promise<ChatMessage[]> {
  const messages: ChatMessage[] = [];
  let open: { message: ChatMessage; parts: (string | Image)[] } | undefined;
  const close = (): void => {
    if (!open) return;
    const { message, parts } = open;
    message.content = parts.some((part) => typeof part !== "string") ? joined(parts) : parts.join("");
    messages.push(message);
    open = undefined;
  };
  for (const entry of entries) {
    if (typeof entry === "object" && "messages" in entry) {
      messages.push(...entry.messages);
      const last = messages.at(-1)?.role === "assistant" ? messages.pop()! : { role: "assistant", content: "" };
      open = { message: { ...last }, parts: [last.content].flat() };
    } else if (typeof entry === "object" && "begin" in entry) {
      const { role, tool_call_id, name } = entry.begin;
      const message: ChatMessage = { role, content: "" };
      if (tool_call_id != null) message.tool_call_id = tool_call_id;
      if (name != null) message.name = name;
      open = { message, parts: [] };
    } else if (typeof entry === "object" && "end" in entry) close();
    else if (!open || (typeof entry === "object" && "tools" in entry)) continue;
    else if (typeof entry === "string" || entry instanceof Image) open.parts.push(entry);
    else if ("replyOf" in entry) {
      const variable = entry.replyOf;
      await variable;
      const { text, toolCalls } = variable.reply;
      open.parts.push(text);
      if (toolCalls.length) {
        open.message.tool_calls = [...(open.message.tool_calls ?? []), ...toolCalls];
        if (variable.reasoning) open.message.reasoning = variable.reasoning;
      }
    } else open.parts.push(await valueOf(entry));
  }
  close();
  return messages;
}

/** With neighbouring texts joined, and without empty ones. */
function joined(parts: readonly (string | Image)[]): (string | Image)[] {
  const found: (string | Image)[] = [];
  for (const part of parts) {
    const last = found.at(-1);
    if (typeof part === "string" && typeof last === "string") found[found.length - 1] = last + part;
    else if (part !== "") found.push(part);
  }
  return found;
}

/** The message as the protocol has it, and the images to upload. */
export function written(message: ChatMessage): [Message, Image[]] {
  const { content, ...rest } = message;
  const files = (message.images ?? []).flatMap(({ image }) => knownFile(image.source) ?? []);
  if (typeof content === "string") return [{ ...rest, content }, files];
  const images = [...(message.images ?? [])];
  let [text, at] = ["", 0];
  for (const part of content) {
    if (typeof part === "string") {
      text += part;
      at += countCodePoints(part);
    } else {
      images.push({ at, image: { source: part.source } });
      files.push(part);
    }
  }
  const placed = images.length ? { images: images.sort((a, b) => a.at - b.at) } : {};
  return [{ ...rest, content: text, ...placed }, files];
}
