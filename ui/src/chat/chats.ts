// The chats of this page: their conversations, and the replies that are being generated.
import { AgentflowError, type Message, type State, type Usage, type Variable } from "agentflow-client";
import { computed, signal } from "@preact/signals";
import { announce } from "../app/announce";
import { sentenceOf, session } from "../app/session";
import { SentenceReader } from "../text/sentences";
import { added, changed, EMPTY, messagesTo, openCalls, switched, type Conversation, type Turn } from "./conversation";
import { runTool, SPECS } from "./tools";

export interface Settings {
  system: string;
  useTools: boolean;
  temperature: number;
  topP: number;
  maxTokens: number;
}

export interface LiveReply {
  variable: Variable;
  isReply: boolean;
  stop(): void;
}

const kept = signal<Conversation[]>([EMPTY]);
export const current = signal(0);
export const chats = computed(() => kept.value);
export const conversation = computed(() => kept.value[current.value] ?? EMPTY);
export const settings = signal<Settings>({ system: "", useTools: false, temperature: 0.7, topP: 0.95, maxTokens: 512 });
/** Replies that stream now, by chat and turn. */
export const live = signal<ReadonlyMap<string, LiveReply>>(new Map());
export const usages = signal<ReadonlyMap<string, Usage>>(new Map());

export const keyOf = (turn: Turn, chat = current.peek()) => `${chat}/${turn.id}`;

export const isStreaming = computed(() =>
  [...live.value.keys()].some((key) => key.startsWith(`${current.value}/`)),
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

export function titleOf(one: Conversation): string {
  const first = one.turns.get(1)?.content.trim().replace(/\s+/g, " ") ?? "";
  return first ? (first.length > 40 ? `${first.slice(0, 40)}…` : first) : "New chat";
}

/**
 * Adds a turn of the user below `parent`, beside what follows it already, and asks for the reply. Half a surrogate
 * pair, which the server would reject, becomes U+FFFD.
 */
export function send(parent: number, text: string): void {
  const chat = current.peek();
  const content = text.toWellFormed();
  const after = update(chat, (before) => added(before, parent, { role: "user", content }));
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

/** Answers a call; with the last answer, the conversation goes on. */
export function answer(turn: Turn, call: { id: string; name: string; arguments: string }, allow: boolean): void {
  const chat = current.peek();
  const content = allow ? runTool(call.name, call.arguments) : "The user declined this call.";
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

function ask(chat: number, parent: number): void {
  const open = session.peek();
  const withReply = update(chat, (before) => added(before, parent, { role: "assistant", content: "" }));
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
  const { system, useTools, temperature, topP, maxTokens } = settings.peek();
  const messages = messagesTo(withReply, parent, system);
  const isReply = open.capabilities.conversations === true;
  let state: State;
  let variable: Variable;
  try {
    state = open.state({ program: "chat" });
    if (isReply) state.converse(messages, useTools ? SPECS : []);
    else withTurns(state, messages);
    variable = state.gen("reply", { maxTokens, reply: isReply, ...(temperature > 0 ? { temperature, topP } : {}) });
  } catch (error) {
    finish({ problem: sentenceOf(error) });
    return;
  }
  live.value = new Map(live.peek()).set(key, { variable, isReply, stop: () => state.cancel() });
  const text = () => textOf(variable, isReply);
  const sentences = new SentenceReader();
  let numRead = 0;
  const unsubscribe = variable.onChange(() => {
    const now = text();
    for (const sentence of sentences.push(now.slice(numRead))) announce(sentence);
    numRead = now.length;
    if (!variable.done) return;
    for (const sentence of sentences.finish()) announce(sentence);
    unsubscribe();
    const calls = isReply ? callsOf(variable) : [];
    const isWhole = variable.error === undefined;
    if (variable.usage) usages.value = new Map(usages.peek()).set(key, variable.usage);
    finish({
      content: now,
      ...(isWhole && calls.length ? { toolCalls: calls } : {}),
      ...(variable.error ? { problem: problemOf(variable.error) } : {}),
      ...(isWhole && variable.finishReason === "length" ? { problem: `It ended at ${maxTokens} tokens.` } : {}),
    });
    state.close();
  });
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

export function callsOf(variable: Variable) {
  try {
    return variable.reply.toolCalls;
  } catch {
    return [];
  }
}

function problemOf(error: AgentflowError): string {
  return error.code === "cancelled" ? "Stopped." : sentenceOf(error);
}

function withTurns(state: State, messages: readonly Message[]): void {
  for (const { role, content } of messages) {
    if (role === "system" || role === "user" || role === "assistant") state[role](content);
  }
}
