// The page's one session with the server, and what the page knows about the server.
//
// `status` is what the status bar shows. The client resumes a broken connection by itself; a server that has
// forgotten the session, that is not ready, or that wants a key is handled here.
import { connect, AgentflowError, type Session } from "agentflow-client";
import { signal } from "@preact/signals";
import { newSessionLog } from "../runs/sessionLog";
import { store, stored } from "./stored";

export type ServerStatus =
  | { kind: "connecting" }
  | { kind: "open" }
  | { kind: "lost" }
  | { kind: "renewing" }
  | { kind: "unready"; reason: string }
  | { kind: "unreachable" }
  | { kind: "key"; wasWrong: boolean }
  | { kind: "ended"; reason: string };

export const status = signal<ServerStatus>({ kind: "connecting" });
export const session = signal<Session | null>(null);
export const models = signal<string[]>([]);
/** The model of the session; null: not known yet. */
export const model = signal<string | null>(null);
/** What the user has chosen; null: the server's first model, which may be another one after a restart. */
let chosen: string | null = null;
/** An error of an action, which the status bar shows until it is dismissed or the action repeated. */
export const trouble = signal<{ text: string; again?: () => void } | null>(null);

const STORED_KEY = "key 1";
/** In memory; stored until the tab is closed if the user wants that. */
let key: string | null = (stored(STORED_KEY) as string | undefined) ?? null;
let attempt = 0; // of open(): a later one makes an earlier one's answers void
let retry: ReturnType<typeof setTimeout> | undefined;
let openedAt = 0;

const FIRST_RETRY_S = 0.25;
const LAST_RETRY_S = 8;
/** A server that ends sessions sooner is asked for a new one less often. */
const SHORT_SESSION_MS = 10_000;

export function useKey(given: string, isStored: boolean): Promise<void> {
  key = given.trim() || null;
  store(STORED_KEY, isStored && key !== null ? key : undefined);
  return open();
}

export const hasKey = () => key !== null;

export function useModel(name: string): Promise<void> {
  model.value = chosen = name;
  return open();
}

/** `fetch` of a path of the server, with the API key. */
export function fetchWithKey(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  if (key !== null) headers.set("Authorization", `Bearer ${key}`);
  return fetch(path, { ...init, headers });
}

/** Opens a new session; the one before is closed. */
export async function open(): Promise<void> {
  const mine = ++attempt;
  clearTimeout(retry);
  const before = session.peek();
  session.value = null;
  void before?.close().catch(() => undefined);
  status.value = { kind: "connecting" };
  try {
    const opened = await connect({
      ...(key === null ? {} : { key }),
      ...(chosen === null ? {} : { model: chosen }),
      record: newSessionLog(),
    });
    if (mine !== attempt) {
      void opened.close().catch(() => undefined);
      return;
    }
    opened.onStatus(() => {
      if (mine === attempt) follow(opened, mine);
    });
    openedAt = performance.now();
    session.value = opened;
    model.value = chosen ?? opened.model;
    follow(opened, mine);
    void listModels(mine);
  } catch (error) {
    if (mine === attempt) await failed(error, mine);
  }
}

function follow(opened: Session, mine: number): void {
  const now = opened.status;
  if (now === "open") status.value = { kind: "open" };
  else if (now === "lost") status.value = { kind: "lost" };
  else if (now === "closed") {
    session.value = null;
    const { error } = opened;
    if (error?.code === "server_lost") {
      // It was restarted, or was away for too long: its states are gone, and a new session begins when it answers.
      status.value = { kind: "renewing" };
      const isShort = performance.now() - openedAt < SHORT_SESSION_MS;
      tryAgainIn(isShort ? 2 : FIRST_RETRY_S, mine);
    } else status.value = { kind: "ended", reason: error?.message ?? "" };
  } else status.value = { kind: "connecting" };
}

async function listModels(mine: number): Promise<void> {
  try {
    const answer = await fetchWithKey("/v1/models");
    const body = (await answer.json()) as { data?: { id: string }[] };
    if (mine === attempt) models.value = (body.data ?? []).map((each) => each.id);
  } catch {
    // the selection of models stays empty
  }
}

async function failed(error: unknown, mine: number): Promise<void> {
  if (error instanceof AgentflowError && error.code === "not_authorized") {
    status.value = { kind: "key", wasWrong: key !== null };
    store(STORED_KEY, undefined);
    return;
  }
  const known = error instanceof AgentflowError ? error : null;
  if (known?.code === "unknown_model" || known?.code === "protocol_error") {
    if (known.code === "unknown_model") {
      // The server has other models now: the next session takes its first one, unless the user chooses again.
      model.value = chosen = null;
      void listModels(mine);
    }
    status.value = { kind: "ended", reason: known.message };
    return;
  }
  const next = await readiness();
  if (mine !== attempt) return;
  if (next === "ready") {
    // Full, or just started: its own message says which.
    status.value = known ? { kind: "unready", reason: known.message } : { kind: "unreachable" };
  } else status.value = next;
  tryAgainIn(known?.retryAfterS ?? 1, mine);
}

function tryAgainIn(delay_s: number, mine: number): void {
  clearTimeout(retry);
  retry = setTimeout(() => void again(mine, Math.min(delay_s * 2, LAST_RETRY_S)), delay_s * 1000);
}

async function again(mine: number, delay_s: number): Promise<void> {
  const next = await readiness();
  if (mine !== attempt) return;
  if (next === "ready") {
    await open();
    return;
  }
  status.value = next;
  tryAgainIn(delay_s, mine);
}

async function readiness(): Promise<"ready" | ServerStatus> {
  try {
    const answer = await fetchWithKey("/health/ready");
    if (answer.ok) return "ready";
    const body = (await answer.json().catch(() => ({}))) as { reason?: string };
    return { kind: "unready", reason: body.reason ?? `it answered ${answer.status}` };
  } catch {
    return { kind: "unreachable" };
  }
}

/** Shows an error of an action as a sentence with a way on. `again` repeats the action. */
export function report(error: unknown, again?: () => void): void {
  trouble.value = { text: sentenceOf(error), ...(again ? { again } : {}) };
}

/** What happened, as one or two sentences. */
export function sentenceOf(error: unknown): string {
  if (!(error instanceof AgentflowError)) {
    return error instanceof Error ? error.message : String(error);
  }
  const wait = error.retryAfterS;
  const when = wait == null ? "in a moment" : `in ${Math.max(1, Math.ceil(wait))} s`;
  switch (error.code) {
    case "overloaded":
      return `The server's queue is full. Try again ${when}.`;
    case "rate_limited":
      return `This key has used up its limit for now. Try again ${when}.`;
    case "engine_failed":
    case "engine_down":
      return "The engine is restarting. What was streamed stays here; run again in a moment.";
    case "server_lost":
    case "server_unreachable":
      return "The connection to the server was lost. What was streamed stays here.";
    case "cancelled":
      return "Cancelled.";
    case "frame_too_large":
      return "This is more text than the server accepts at once: shorten it.";
    default:
      return /[.!?]$/.test(error.message) ? error.message : `${error.message}.`;
  }
}
