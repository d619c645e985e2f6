// The chats of this page: their conversations, and the replies that are being generated.
import {
  AgentflowError,
  type CalledTool,
  type ChatMessage,
  type Session,
  type State,
  type Variable,
} from "agentflow-client";
import { computed, signal } from "@preact/signals";
import { announce } from "../app/announce";
import { counted } from "../charts/numbers";
import { model, models, sentenceOf, session } from "../app/session";
import { keepStored, stored } from "../app/stored";
import { imageOf, isLost, keepImages } from "../images/kept";
import type { ShownImage } from "../images/picture";
import { blindness, LOST } from "../images/sight";
import { SentenceReader } from "../text/sentences";
import { shortened } from "../text/shorten";
import {
  added,
  changed,
  declined,
  EMPTY,
  fromPlain,
  imagesTo,
  messagesTo,
  openCalls,
  switched,
  toPlain,
  type Conversation,
  type PlainConversation,
  type Turn,
} from "./conversation";
import { figuresOf } from "./figures";
import { runTool, SPECS } from "./tools";

/** `required`: each message of the user is answered by a call, and the answer to a call as the model likes. */
export type ToolUse = "none" | "auto" | "required";

export interface Settings {
  system: string;
  tools: ToolUse;
  temperature: number;
  topP: number;
  maxTokens: number;
}

export interface LiveReply {
  variable: Variable;
  isReply: boolean;
  stop(): void;
}

interface Stored {
  readonly chats: readonly PlainConversation[];
  readonly current: number;
  readonly settings: Settings;
}

interface Draft {
  readonly text: string;
  readonly images: readonly ShownImage[];
}

const STORED = "chats 2";
const before = stored(STORED) as Stored | undefined;
const STORED_DRAFT = "draft 1";
const draftBefore = stored(STORED_DRAFT) as Draft | undefined;

const kept = signal<Conversation[]>(before?.chats.map(fromPlain) ?? [EMPTY]);
export const current = signal(before?.current ?? 0);
/** What is being written. */
export const draft = signal(draftBefore?.text ?? "");
export const draftImages = signal<readonly ShownImage[]>(draftBefore?.images ?? []);
/** The chats that can be chosen, with their numbers. A deleted one leaves its number unused. */
export const chats = computed(() =>
  [...kept.value.entries()].filter(([number, one]) => one !== EMPTY || number === current.value),
);
export const conversation = computed(() => kept.value[current.value] ?? EMPTY);
export const settings = signal<Settings>(
  before?.settings ?? { system: "", tools: "none", temperature: 0.7, topP: 0.95, maxTokens: 512 },
);
/** Replies that stream now, by chat and turn. */
export const live = signal<ReadonlyMap<string, LiveReply>>(new Map());

export const keyOf = (turn: Turn, chat = current.peek()) => `${chat}/${turn.id}`;

export const isStreaming = computed(() =>
  [...live.value.keys()].some((key) => key.startsWith(`${current.value}/`)),
);

/** With what has arrived of the replies that stream: they end with the page. */
function withLiveTexts(one: Conversation, chat: number): Conversation {
  let after = one;
  for (const turn of one.turns.values()) {
    const reply = live.peek().get(keyOf(turn, chat));
    if (!reply) continue;
    const content = textOf(reply.variable, reply.isReply);
    const reasoning = reply.variable.reasoning;
    const problem = "The page was left before the reply was complete.";
    after = changed(after, turn.id, { content, problem, ...(reasoning ? { reasoning } : {}) });
  }
  return after;
}

/** The chat that was deleted last. */
export const deleted = signal<{ readonly number: number; readonly chat: Conversation } | null>(null);

keepImages("chat", () => [
  ...draftImages.value,
  ...[...kept.value, deleted.value?.chat ?? EMPTY].flatMap(({ turns }) => [...turns.values()].flatMap(({ images }) => images ?? [])),
]);

/** Whether the chats as they are now survive a reload. */
export const isKept = keepStored(
  STORED,
  () => [kept.value, current.value, settings.value],
  (): Stored => ({
    chats: kept.peek().map((one, chat) => toPlain(withLiveTexts(one, chat))),
    current: current.peek(),
    settings: settings.peek(),
  }),
);
// Not with the chats, which are long: it changes with each key.
keepStored(
  STORED_DRAFT,
  () => [draft.value, draftImages.value],
  (): Draft => ({ text: draft.peek(), images: draftImages.peek() }),
);

function update(chat: number, change: (before: Conversation) => Conversation): Conversation {
  const after = change(kept.peek()[chat]!);
  kept.value = kept.peek().with(chat, after);
  return after;
}

export function newChat(): void {
  if (kept.peek().at(-1) !== EMPTY) kept.value = [...kept.peek(), EMPTY];
  current.value = kept.peek().length - 1;
}

/** Deletes the shown chat, in which nothing may stream, and shows the one before it. */
export function deleteChat(): void {
  const number = current.peek();
  deleted.value = { number, chat: kept.peek()[number]! };
  update(number, () => EMPTY);
  const left = chats.peek().map(([other]) => other);
  current.value = left.findLast((other) => other < number) ?? left.find((other) => other > number) ?? number;
}

/** Restores the chat that was deleted last, and shows it. */
export function restoreChat(): void {
  const { number, chat } = deleted.peek()!;
  deleted.value = null;
  const place = kept.peek()[number] === EMPTY ? number : kept.peek().length;
  kept.value = kept.peek().toSpliced(place, 1, chat);
  current.value = place;
}

export function titleOf(one: Conversation): string {
  const turn = one.turns.get(1);
  const first = turn?.content.trim().replace(/\s+/g, " ") || turn?.images?.[0]?.name || "";
  return shortened(first, 41) || "New chat";
}

/**
 * Adds a turn of the user below `parent`, beside what follows it already, and asks for the reply. Calls that are
 * still open there are declined. Half a surrogate pair, which the server would reject, becomes U+FFFD.
 */
export function send(parent: number, text: string, images: readonly ShownImage[] = []): void {
  const chat = current.peek();
  const content = text.toWellFormed();
  const after = update(chat, (before) => {
    const [settled, last] = declined(before, parent, DECLINED);
    return added(settled, last, { role: "user", content, ...(images.length ? { images } : {}) });
  });
  ask(chat, after.turns.size);
}

/** Asks for another reply in the place of this one. */
export function again(turn: Turn): void {
  ask(current.peek(), turn.parent);
}

export function show(id: number): void {
  update(current.peek(), (before) => switched(before, id));
}

export function stop(): void {
  for (const [key, reply] of live.peek()) if (key.startsWith(`${current.peek()}/`)) reply.stop();
}

const DECLINED = "The user declined this call.";

/** Answers a call; with the last answer, the conversation goes on. */
export function answer(turn: Turn, call: { id: string; name: string; arguments: string }, allow: boolean): void {
  const chat = current.peek();
  const content = allow ? runTool(call.name, call.arguments) : DECLINED;
  announce(`${call.name}: ${content}`);
  const before = kept.peek()[chat]!;
  let parent = turn.id;
  for (let id = before.shown.get(parent); id !== undefined && before.turns.get(id)!.role === "tool"; id = before.shown.get(id)) {
    parent = id;
  }
  const after = update(chat, (now) =>
    added(now, parent, { role: "tool", content, call: { id: call.id, name: call.name } }),
  );
  if (openCalls(after, turn).length === 0) ask(chat, after.turns.size);
}

function nameOfModel(): { model?: string } {
  const name = model.peek();
  return models.peek().length > 1 && name !== null ? { model: name } : {};
}

function ask(chat: number, parent: number): void {
  const open = session.peek();
  const withReply = update(chat, (before) => added(before, parent, { role: "assistant", content: "", ...nameOfModel() }));
  const id = withReply.turns.size;
  const key = `${chat}/${id}`;
  const finish = (change: Partial<Turn>): void => {
    update(chat, (before) => changed(before, id, change));
    const rest = new Map(live.peek());
    rest.delete(key);
    live.value = rest;
  };
  if (!open) {
    finish({ problem: "There is no connection to a server." });
    return;
  }
  const images = imagesTo(withReply, parent);
  const refusal = images.length > 0 ? (blindness(open) ?? (images.some(isLost) ? LOST : null)) : null;
  if (refusal !== null) {
    finish({ problem: refusal });
    return;
  }
  const { system, maxTokens } = settings.peek();
  const isReply = open.capabilities.conversations === true;
  let variable: Variable;
  try {
    variable = generate(open, messagesTo(withReply, parent, system, imageOf), isReply);
  } catch (error) {
    finish({ problem: sentenceOf(error) });
    return;
  }
  const { state } = variable;
  live.value = new Map(live.peek()).set(key, { variable, isReply, stop: () => state.cancel() });
  const text = () => textOf(variable, isReply);
  const sentences = new SentenceReader();
  let numRead = 0;
  const startMs = performance.now();
  let firstMs: number | null = null;
  const unsubscribe = variable.onChange(() => {
    const now = text();
    const atMs = performance.now();
    if (variable.text !== "" || variable.reasoning !== "") firstMs ??= atMs;
    for (const sentence of sentences.push(now.slice(numRead))) announce(sentence);
    numRead = now.length;
    if (!variable.done) return;
    for (const sentence of sentences.finish()) announce(sentence);
    unsubscribe();
    const isWhole = variable.error === undefined;
    const calls = Map.groupBy(isReply ? callsOf(variable) : [], (call) => isWhole && isComplete(call));
    const { usage } = variable;
    const numOutput = usage?.output_tokens || maxTokens;
    finish({
      content: now,
      ...(variable.reasoning ? { reasoning: variable.reasoning } : {}),
      toolCalls: calls.get(true) ?? [],
      truncatedCalls: calls.get(false) ?? [],
      ...(usage ? { figures: figuresOf(usage, ((firstMs ?? atMs) - startMs) / 1000, (atMs - startMs) / 1000) } : {}),
      ...(variable.error ? { problem: problemOf(variable.error) } : {}),
      ...(isWhole && variable.finishReason === "length" ? { problem: `It ended at ${counted(numOutput, "token")}.` } : {}),
    });
    state.close();
  });
}

/** The reply to the messages, in a new state, which is closed if they cannot be sent. */
function generate(open: Session, messages: readonly ChatMessage[], isReply: boolean): Variable {
  const { tools, temperature, topP, maxTokens } = settings.peek();
  const state = open.state({ program: "chat" });
  try {
    if (isReply && tools !== "none") {
      const mode = tools === "required" && messages.at(-1)?.role === "user" ? "required" : "auto";
      state.converse(messages, SPECS, { mode });
    } else if (isReply) state.converse(messages);
    else withTurns(state, messages);
    const sampling = temperature > 0 ? { temperature, topP } : {};
    return state.gen("reply", { maxTokens, reply: isReply, streamReasoning: true, ...sampling });
  } catch (error) {
    state.close();
    throw error;
  }
}

/** What has arrived of a reply's prose. A malformed notation is shown as it is. */
export function textOf(variable: Variable, isReply: boolean): string {
  if (!isReply) return variable.text;
  try {
    return variable.reply.text;
  } catch {
    return variable.text;
  }
}

export function callsOf(variable: Variable): CalledTool[] {
  try {
    return variable.reply.toolCalls;
  } catch {
    return [];
  }
}

/** Whether the arguments are a JSON object. Those of a reply that ended early may be truncated. */
function isComplete(call: CalledTool): boolean {
  try {
    const given: unknown = JSON.parse(call.arguments);
    return typeof given === "object" && given !== null && !Array.isArray(given);
  } catch {
    return false;
  }
}

function problemOf(error: AgentflowError): string {
  return error.code === "cancelled" ? "Stopped." : sentenceOf(error);
}

function withTurns(state: State, messages: readonly ChatMessage[]): void {
  for (const { role, content } of messages) {
    const parts = typeof content === "string" ? [content] : content;
    if (role === "system" || role === "user" || role === "assistant") state[role](...parts);
  }
}
