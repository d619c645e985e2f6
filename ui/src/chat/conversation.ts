// A conversation as a tree of turns: an edited turn is a sibling of the one before, and one branch is shown.
import type { CalledTool, ChatMessage, Image } from "agentflow-client";
import type { ShownImage } from "../images/picture";
import type { Figures } from "./figures";

export interface Turn {
  readonly id: number;
  /** 0: the conversation's beginning. */
  readonly parent: number;
  readonly role: "user" | "assistant" | "tool";
  readonly content: string;
  /** Of a turn of the user: they stand before its text. */
  readonly images?: readonly ShownImage[];
  /** What the model thought before a reply. */
  readonly reasoning?: string;
  readonly toolCalls?: readonly CalledTool[];
  /** Calls of a reply that ended before their arguments did: shown, and sent to no model. */
  readonly truncatedCalls?: readonly CalledTool[];
  /** Of a tool's turn: the call that it answers. */
  readonly call?: { readonly id: string; readonly name: string };
  /** Of a reply on a server with several models. */
  readonly model?: string;
  /** Of a reply that has ended by itself. */
  readonly figures?: Figures;
  /** Why a reply has ended early. */
  readonly problem?: string;
}

export interface Conversation {
  readonly turns: ReadonlyMap<number, Turn>;
  /** The shown child of each turn, by its id. */
  readonly shown: ReadonlyMap<number, number>;
}

export const EMPTY: Conversation = { turns: new Map(), shown: new Map() };

/** A conversation as plain data, for JSON. */
export interface PlainConversation {
  readonly turns: readonly Turn[];
  readonly shown: readonly (readonly [number, number])[];
}

export function toPlain({ turns, shown }: Conversation): PlainConversation {
  return { turns: [...turns.values()], shown: [...shown] };
}

export function fromPlain({ turns, shown }: PlainConversation): Conversation {
  return turns.length === 0 ? EMPTY : { turns: new Map(turns.map((turn) => [turn.id, turn])), shown: new Map(shown) };
}

/** With a turn more, which is shown. Its id is the number of turns. */
export function added(before: Conversation, parent: number, turn: Omit<Turn, "id" | "parent">): Conversation {
  const id = before.turns.size + 1;
  return {
    turns: new Map(before.turns).set(id, { ...turn, id, parent }),
    shown: new Map(before.shown).set(parent, id),
  };
}

export function changed(before: Conversation, id: number, change: Partial<Turn>): Conversation {
  const turn = before.turns.get(id);
  if (!turn) return before;
  return { ...before, turns: new Map(before.turns).set(id, { ...turn, ...change, id, parent: turn.parent }) };
}

/** With the branch of this turn shown. */
export function switched(before: Conversation, id: number): Conversation {
  const turn = before.turns.get(id);
  return turn ? { ...before, shown: new Map(before.shown).set(turn.parent, id) } : before;
}

/** The turns that are shown, from the first one. */
export function pathOf(conversation: Conversation): Turn[] {
  const path: Turn[] = [];
  for (let id = conversation.shown.get(0); id !== undefined; id = conversation.shown.get(id)) {
    path.push(conversation.turns.get(id)!);
  }
  return path;
}

/** The turns that stand in the same place, in the order in which they were made. */
export function siblingsOf(conversation: Conversation, turn: Turn): number[] {
  return [...conversation.turns.values()].filter((one) => one.parent === turn.parent).map((one) => one.id);
}

/** The images of the turns up to and with `id`. */
export function imagesTo(conversation: Conversation, id: number): ShownImage[] {
  const images: ShownImage[] = [];
  for (let turn = conversation.turns.get(id); turn; turn = conversation.turns.get(turn.parent)) {
    images.push(...(turn.images ?? []));
  }
  return images;
}

/** The messages of the turns up to and with `id`. `imageOf`: the images of their sources. */
export function messagesTo(
  conversation: Conversation,
  id: number,
  system = "",
  imageOf: (source: string) => Image | undefined = () => undefined,
): ChatMessage[] {
  const messages: ChatMessage[] = [];
  for (let turn = conversation.turns.get(id); turn; turn = conversation.turns.get(turn.parent)) {
    const images = (turn.images ?? []).flatMap(({ source }) => imageOf(source) ?? []);
    const content = images.length ? [...images, ...(turn.content ? [turn.content] : [])] : turn.content;
    const message: ChatMessage = { role: turn.role, content };
    if (turn.toolCalls?.length) message.tool_calls = [...turn.toolCalls];
    if (turn.toolCalls?.length && turn.reasoning) message.reasoning = turn.reasoning;
    if (turn.call) message.tool_call_id = turn.call.id;
    messages.push(message);
  }
  if (system.trim()) messages.push({ role: "system", content: system });
  return messages.reverse();
}

/** The calls of a reply that no tool's turn below it on the shown path has answered. */
export function openCalls(conversation: Conversation, turn: Turn): CalledTool[] {
  const answered = new Set<string>();
  for (let id = conversation.shown.get(turn.id); id !== undefined; id = conversation.shown.get(id)) {
    const below = conversation.turns.get(id)!;
    if (below.role !== "tool") break;
    answered.add(below.call!.id);
  }
  return (turn.toolCalls ?? []).filter((call) => !answered.has(call.id));
}

/** With an answer to each call that is open above or at `parent`, and the turn that the next one follows. */
export function declined(before: Conversation, parent: number, content: string): [Conversation, number] {
  let turn = before.turns.get(parent);
  const answered = new Set<string>();
  for (; turn?.role === "tool"; turn = before.turns.get(turn.parent)) answered.add(turn.call!.id);
  let [after, last] = [before, parent];
  for (const { id, name } of turn?.toolCalls ?? []) {
    if (answered.has(id)) continue;
    after = added(after, last, { role: "tool", content, call: { id, name } });
    last = after.turns.size;
  }
  return [after, last];
}
