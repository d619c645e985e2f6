// One session over as many websockets as it takes.

import { AgentflowError } from "./agentflow_error.js";
import { guarded } from "./changes.js";
import { Cursors } from "./cursors.js";
import { FrameTooLarge, Overloaded, ProtocolError, ServerLost, ServerUnreachable } from "./errors.js";
import { OpQueue } from "./op_queue.js";
import {
  TAKEN_OVER,
  type Capabilities,
  type Op,
  type ServerEvent,
  type ServerFrame,
  type WelcomeFrame,
} from "./protocol.js";
import { receivedError } from "./received_error.js";
import { unexpected, type Socket, type SocketEnd, type Transport } from "./transport.js";

/** Whether ops are carried: `lost` while the client reconnects, `closed` when the session has ended. */
export type Status = "connecting" | "open" | "lost" | "closed";

// The websocket buffers at most about so many bytes; more ops wait in the queue.
const MAX_BUFFERED_BYTES = 1024 * 1024;
const BUFFER_POLL_MS = 10;
const FIRST_BACKOFF_MS = 50;
const LAST_BACKOFF_MS = 1000;
const GOODBYE_MS = 1000;

const TOO_BIG = 1009;
const FINAL_CODES: Readonly<Record<number, string>> = {
  1000: "the server ended the session",
  1002: "the server could not decode a frame",
  1003: "the server could not decode a frame",
  1007: "the server could not decode a frame",
  1008: "the server ended the session",
  1012: "the server was shut down, and the session ended with it",
  [TAKEN_OVER]: "another connection has taken the session over",
};

// A recording has the ops and events of states and variables.
const UNRECORDED = new Set([
  "want",
  "getstats",
  "getgraph",
  "watch",
  "unwatch",
  "peek",
  "statsreply",
  "graphreply",
  "watched",
  "peeked",
]);

/** What a connection reports to its session. */
export interface ConnectionHandlers {
  /** Takes events that were not received before. */
  deliver(events: readonly ServerEvent[]): void;
  /** The status has changed. */
  changed(status: Status): void;
  /** The session has ended with an error. */
  ended(error: AgentflowError): void;
}

/** Ops whose answers no cursor covers; they are sent again if the answer was lost with the connection. */
type Answer = Extract<ServerEvent, { event: "statsreply" | "graphreply" | "peeked" }>;
type AskingOp = Extract<Op, { op: "getstats" | "getgraph" | "peek" }>;

/** One session from the first `welcome` to the `bye`. */
export class Connection {
  status: Status = "open";
  error: AgentflowError | undefined;
  /** The default model of the states. */
  readonly model: string;
  /** The capabilities of each model by name. */
  readonly models: Readonly<Record<string, Capabilities>>;
  #transport: Transport;
  #handlers: ConnectionHandlers;
  #socket: Socket | undefined;
  #welcome: WelcomeFrame;
  #queue: OpQueue;
  #cursors = new Cursors();
  #unanswered = new Map<number, { op: AskingOp; number: number }>();
  #isWriting = false;
  #isLeaving = false;
  #keepaliveMs: number;
  #keepaliveTimer: ReturnType<typeof setTimeout> | undefined;
  #receivedAt = Date.now();
  #hasProbed = false;
  #nextTicket = 1;
  #stopWaiting: () => void = () => {};
  readonly #abandon = new AbortController();
  readonly #record: ((line: object) => void) | undefined;
  readonly #openedAt = performance.now();

  constructor(
    transport: Transport,
    socket: Socket,
    welcome: WelcomeFrame,
    handlers: ConnectionHandlers,
    options: {
      keepaliveS: number;
      maxBufferedBytes: number;
      record?: ((line: object) => void) | undefined;
    },
  ) {
    this.#record = options.record;
    this.#note({
      recording: 2,
      agentflow: "",
      started: new Date().toISOString(),
      seed: 0,
      model: welcome.model,
      models: welcome.models,
    });
    this.#transport = transport;
    this.#welcome = welcome;
    this.#handlers = handlers;
    this.model = welcome.model;
    this.models = welcome.models;
    this.#queue = new OpQueue(welcome.limits.frame_bytes, options.maxBufferedBytes);
    this.#keepaliveMs = options.keepaliveS * 1000;
    this.#adopt(socket);
  }

  /** The largest frame. */
  get frameBytes(): number {
    return this.#queue.frameBytes;
  }

  /** A number for an op that asks for an answer. */
  nextTicket(): number {
    return this.#nextTicket++;
  }

  /** Queues an op for the next frame. Throws the error that ended the session. */
  send(op: Op): void {
    if (this.error) throw this.error;
    // The queue checks the op, so it comes first; a delayed `close` is queued later.
    if (op.op === "close") {
      if (!this.#cursors.submit(op)) return;
      this.#queue.add(op);
    } else {
      const number = this.#queue.add(op);
      this.#cursors.submit(op);
      if (isAsking(op)) this.#unanswered.set(op.ticket, { op, number });
    }
    // A recording has no bytes of images, only their digests.
    if (!UNRECORDED.has(op.op)) this.#noteNow("sent", [op.op === "upload" ? { ...op, data: "" } : op]);
    this.#write();
  }

  /** Throws what `send` would throw for one of these ops, which are sent next. */
  check(ops: readonly Op[]): void {
    if (this.error) throw this.error;
    this.#queue.check(ops);
  }

  /** Whether the server knows the state. */
  isOpen(state: number): boolean {
    return !this.error && this.#cursors.isOpen(state);
  }

  /** Tries to reconnect now, instead of after the current delay. */
  hurry(): void {
    this.#stopWaiting();
  }

  /** Ends the session with `error`: sends `bye`, and waits for the server's answer, at most a second. */
  async leave(error: AgentflowError): Promise<void> {
    if (this.error) return;
    this.#isLeaving = true;
    const socket = this.#socket;
    this.#end(error);
    if (!socket) return;
    await new Promise<void>((resolve) => {
      const timer = setTimeout(() => socket.close(), GOODBYE_MS);
      socket.listen(
        () => {},
        () => {
          clearTimeout(timer);
          resolve();
        },
      );
      try {
        socket.send('{"frame":"bye"}');
        socket.closeGently();
      } catch {
        socket.close();
      }
    });
  }

  #adopt(socket: Socket): void {
    this.#socket = socket;
    this.#receivedAt = Date.now();
    this.#hasProbed = false;
    socket.listen(
      (frame) => this.#receive(frame),
      (end) => this.#lose(end),
    );
    this.#watchSilence();
  }

  /** Sends what waits, once the ops of this turn of the event loop are queued. */
  #write(): void {
    if (this.#isWriting) return;
    this.#isWriting = true;
    queueMicrotask(() => this.#writeNow());
  }

  #writeNow(): void {
    this.#isWriting = false;
    const socket = this.#socket;
    if (!socket || this.error) return;
    try {
      while (socket.bufferedAmount < MAX_BUFFERED_BYTES) {
        const frame = this.#queue.nextFrame();
        if (frame === undefined) return;
        socket.send(frame);
      }
    } catch {
      return; // the connection is ending; its close event follows
    }
    this.#isWriting = true;
    setTimeout(() => this.#writeNow(), BUFFER_POLL_MS);
  }

  #receive(frame: ServerFrame): void {
    this.#receivedAt = Date.now();
    this.#hasProbed = false;
    try {
      switch (frame.frame) {
        case "events": {
          this.#queue.acknowledge(frame.ack);
          const events = this.#withoutRepeated(this.#cursors.receive(frame.events ?? []));
          this.#noteNow("received", events);
          this.#handlers.deliver(events);
          for (const close of this.#cursors.dueCloses()) this.send(close);
          break;
        }
        case "refused":
          throw receivedError(frame.error);
        default:
          throw unexpected(frame, "an events frame");
      }
    } catch (error) {
      this.#fail(
        error instanceof AgentflowError
          ? error
          : new ProtocolError(`a frame cannot be read: ${String(error)}`, { cause: error }),
      );
    }
  }

  #noteNow(direction: "sent" | "received", items: readonly (Op | ServerEvent)[]): void {
    if (!this.#record) return;
    const at_s = (performance.now() - this.#openedAt) / 1000;
    for (const item of items) {
      if ("op" in item || !UNRECORDED.has(item.event)) this.#note({ at_s, [direction]: item });
    }
  }

  #note(line: object): void {
    const record = this.#record;
    if (record) guarded(() => record(line));
  }

  #withoutRepeated(events: ServerEvent[]): ServerEvent[] {
    if (!this.#unanswered.size) {
      return events.filter((event) => !isAnswer(event));
    }
    return events.filter((event) => !isAnswer(event) || this.#unanswered.delete(event.ticket));
  }

  #lose(end: SocketEnd): void {
    this.#socket = undefined;
    if (this.#isLeaving || this.error) return;
    if (end.code === TOO_BIG) {
      this.#fail(
        new FrameTooLarge(
          `${this.#transport.url}, or a proxy in front of it, accepts only smaller frames than announced`,
        ),
      );
    } else if (end.code in FINAL_CODES) {
      this.#fail(new ServerLost(`${FINAL_CODES[end.code]} (closed with code ${end.code} ${end.reason})`));
    } else {
      this.#setStatus("lost");
      void this.#reconnect(end);
    }
  }

  async #reconnect(end: SocketEnd): Promise<void> {
    let why = `closed with code ${end.code} ${end.reason}`.trimEnd();
    let delayMs = 0;
    let atLeastMs = 0;
    const graceMs = this.#welcome.limits.resume_grace_s * 1000;
    const deadline = Date.now() + graceMs;
    while (!this.error) {
      await this.#wait(Math.max(delayMs * (0.5 + Math.random() / 2), atLeastMs));
      if (this.error) return;
      if (Date.now() > deadline) break;
      delayMs = delayMs ? Math.min(LAST_BACKOFF_MS, delayMs * 2) : FIRST_BACKOFF_MS;
      try {
        const resume = this.#cursors.resume(this.#welcome.session, this.#welcome.secret);
        const [socket, welcome] = await this.#transport.open(resume, this.#abandon.signal);
        if (this.error) return socket.close();
        this.#resume(socket, welcome);
        return;
      } catch (error) {
        if (this.error) return;
        if (!(error instanceof ServerUnreachable || error instanceof Overloaded)) {
          this.#fail(error instanceof AgentflowError ? error : new ServerLost(String(error), { cause: error }));
          return;
        }
        why = error.message;
        atLeastMs = Math.min((error.retryAfterS ?? 0) * 1000, Math.max(0, deadline - Date.now()));
      }
    }
    this.#fail(
      new ServerLost(
        `the connection to ${this.#transport.url} broke and could not be resumed within ${graceMs / 1000} s (${why})`,
      ),
    );
  }

  #resume(socket: Socket, welcome: WelcomeFrame): void {
    this.#welcome = welcome;
    this.#queue.frameBytes = welcome.limits.frame_bytes;
    try {
      this.#queue.resume(welcome.ack ?? 0);
    } catch (error) {
      this.#socket = socket;
      this.#fail(error as AgentflowError);
      return;
    }
    this.#adopt(socket);
    for (const [ticket, { op, number }] of [...this.#unanswered]) {
      if (this.#queue.isAcknowledged(number)) {
        this.#unanswered.set(ticket, { op, number: this.#queue.add(op) });
      }
    }
    this.#setStatus("open");
    this.#write();
  }

  #wait(ms: number): Promise<void> {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.#stopWaiting = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  /** A script cannot send pings: after so much silence a question takes their place. */
  #watchSilence(): void {
    clearTimeout(this.#keepaliveTimer);
    if (!this.#socket || this.error) return;
    const silentMs = Date.now() - this.#receivedAt;
    if (silentMs >= this.#keepaliveMs) {
      if (this.#hasProbed) {
        this.#socket.close({ code: 1006, reason: `no answer within ${this.#keepaliveMs / 1000} s` });
        return;
      }
      this.#hasProbed = true;
      this.#receivedAt = Date.now();
      this.send({ op: "getstats", ticket: this.nextTicket() });
    }
    const timer = setTimeout(
      () => this.#watchSilence(),
      this.#keepaliveMs - (Date.now() - this.#receivedAt),
    );
    this.#keepaliveTimer = timer;
    // In Node.js, an idle session does not keep the process alive for this.
    if (typeof timer === "object") (timer as { unref?: () => void }).unref?.();
  }

  #fail(error: AgentflowError): void {
    const socket = this.#socket;
    this.#end(error);
    socket?.close();
  }

  #end(error: AgentflowError): void {
    if (this.error) return;
    this.error = error;
    clearTimeout(this.#keepaliveTimer);
    this.#abandon.abort(error);
    this.#stopWaiting();
    this.#setStatus("closed");
    this.#handlers.ended(error);
  }

  #setStatus(status: Status): void {
    if (status === this.status) return;
    this.status = status;
    this.#handlers.changed(status);
  }
}

function isAsking(op: Op): op is AskingOp {
  return op.op === "getstats" || op.op === "getgraph" || op.op === "peek";
}

function isAnswer(event: ServerEvent): event is Answer {
  return event.event === "statsreply" || event.event === "graphreply" || event.event === "peeked";
}
