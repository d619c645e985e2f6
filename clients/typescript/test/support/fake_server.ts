// A server in memory: a reference model of the session protocol over websockets that a test can cut anywhere.

import assert from "node:assert/strict";
import type { ClientFrame, Op, ServerEvent, ServerFrame } from "../../src/protocol.js";
import type { WebSocketConstructor, WebSocketLike } from "../../src/transport.js";

/** One variable on the server. `position`s count code points. */
interface ServedVariable {
  readonly state: number;
  readonly points: string[];
  position: number; // sent on this connection, or confirmed by a resume
  hasEnded: boolean; // its end was sent
  endArrived: boolean;
}

interface ServedState {
  readonly ops: Op[]; // awaits that are not reached
  reached: number;
}

/** `texts`: the text of each gen, by its name. */
export class FakeServer {
  readonly accepted: Op[] = [];
  readonly sockets: FakeSocket[] = [];
  readonly WebSocket: WebSocketConstructor;
  numResumes = 0;
  refusesConnections = false;
  graceS = 10;
  readonly #texts: ReadonlyMap<string, string>;
  readonly #variables = new Map<number, ServedVariable>();
  readonly #states = new Map<number, ServedState>();
  #answers: ServerEvent[] = [];
  #session = 0;

  constructor(texts: ReadonlyMap<string, string> = new Map()) {
    this.#texts = texts;
    const server = this;
    this.WebSocket = class extends FakeSocket {
      constructor(url: string, protocols?: string[]) {
        super(server, url, protocols);
      }
    };
  }

  /** The connection that is open, or the last one. */
  get socket(): FakeSocket {
    return this.sockets.at(-1)!;
  }

  /** Variables whose end was not sent. */
  get unfinished(): number[] {
    return [...this.#variables].filter(([, variable]) => !variable.hasEnded).map(([number]) => number);
  }

  /** Whether the server forgot all states. */
  get isEmpty(): boolean {
    return this.#states.size === 0 && this.#variables.size === 0;
  }

  handle(socket: FakeSocket, frame: ClientFrame): void {
    switch (frame.frame) {
      case "hello":
        if (frame.resume) {
          this.numResumes++;
          assert.equal(frame.resume.session, `s${this.#session}`);
          assert.equal(frame.resume.secret, "secret");
          this.#resume(frame.resume.variables ?? {}, frame.resume.states ?? {});
        } else {
          this.#session++;
        }
        socket.down({
          frame: "welcome",
          version: 2,
          session: `s${this.#session}`,
          secret: "secret",
          model: "fake",
          models: { fake: {
            model: "fake",
            roles: true,
            select: true,
            batch_size: null,
            logprobs: true,
            seeds: true,
            max_context: null,
            constraints: [],
            images: false,
            videos: false,
            video_frames: false,
            token_ids: true,
            conversations: true,
            watch: true,
            embedding_models: [],
            sampling: null,
            default_max_tokens: 256,
            continuation: true,
            plain_text: true,
            candidates: [],
            decisions: true,
            generates: true,
            reasons: null,
          } },
          limits: { frame_bytes: 1024 * 1024, resume_grace_s: this.graceS },
          ack: this.accepted.length,
        });
        break;
      case "ops": {
        const numKnown = this.accepted.length + 1 - frame.first;
        assert.ok(numKnown >= 0, `a gap: op ${frame.first} after ${this.accepted.length}`);
        for (const op of frame.ops.slice(numKnown)) this.#accept(op);
        break;
      }
      case "bye":
        this.#states.clear();
        this.#variables.clear();
        socket.end(1000);
    }
  }

  /** Sends up to `size` code points of a variable, and its end after the last. */
  progress(number: number, size: number): ServerEvent[] {
    const variable = this.#variables.get(number);
    if (!variable || variable.hasEnded) return [];
    const at = variable.position;
    const text = variable.points.slice(at, at + size).join("");
    variable.position = Math.min(at + size, variable.points.length);
    if (variable.position < variable.points.length) {
      return text ? [{ event: "delta", var: number, at, text }] : [];
    }
    variable.hasEnded = true;
    const tokens = { prompt_tokens: 1, cached_tokens: 0, output_tokens: 1, forced_tokens: 0, reasoning_tokens: 0 };
    const unused = { written_tokens: 0, cost: 0, saved_calls: 0, saved_tokens: 0, rejected_answers: 0 };
    const usage = { ...tokens, ...unused, miss_reason: "" };
    return [{ event: "value", var: number, at, text, finish_reason: "eos", usage }, ...this.#reach(variable.state)];
  }

  /** Sends events in one frame. */
  send(...events: ServerEvent[]): void {
    this.socket.down({ frame: "events", ack: this.accepted.length, events: [...this.#answers, ...events] });
    this.#answers = [];
  }

  /** The next frame of the server arrives, whose ends a `close` may then follow. */
  arrived(frame: ServerFrame): void {
    if (frame.frame !== "events") return;
    for (const event of frame.events ?? []) {
      if (event.event === "value") this.#variables.get(event.var)!.endArrived = true;
    }
  }

  #accept(op: Op): void {
    this.accepted.push(op);
    switch (op.op) {
      case "open":
      case "submit": // its ops do not run
        this.#open(op.state);
        break;
      case "cancel":
        break;
      case "fork":
        for (const child of op.children) this.#open(child);
        break;
      case "gen":
        this.#variables.set(op.var, {
          state: op.state,
          points: [...this.#texts.get(op.name)!],
          position: 0,
          hasEnded: false,
          endArrived: false,
        });
        break;
      case "await":
        this.#states.get(op.state)!.ops.push(op);
        this.#answers.push(...this.#reach(op.state));
        break;
      case "close":
        for (const [number, variable] of this.#variables) {
          if (variable.state !== op.state) continue;
          assert.ok(variable.endArrived, `state ${op.state} was closed before the end of ${number} had arrived`);
          this.#variables.delete(number);
        }
        assert.ok(this.#states.delete(op.state), `close of the unknown state ${op.state}`);
        break;
      case "getstats":
        this.#answers.push({ event: "statsreply", ticket: op.ticket, stats: { model: "fake" } as never });
        break;
      case "getgraph": {
        const states = [...this.#states.keys()].map((id) => ({ id, program: id }));
        const others = op.of_tenant ? { others: [{ states: [{ id: 1, program: 1, label: "other" }] }] } : {};
        this.#answers.push({ event: "graphreply", ticket: op.ticket, graph: { states }, ...others });
        break;
      }
      default:
        if ("state" in op) assert.ok(this.#states.has(op.state), `${op.op} of the unknown state ${op.state}`);
    }
  }

  #open(state: number): void {
    assert.ok(!this.#states.has(state), `state ${state} is open`);
    this.#states.set(state, { ops: [], reached: 0 });
  }

  /** The answer to the awaits of a state without unfinished variables. */
  #reach(number: number): ServerEvent[] {
    const state = this.#states.get(number)!;
    if ([...this.#variables.values()].some((one) => one.state === number && !one.hasEnded)) return [];
    const last = state.ops.splice(0).at(-1);
    if (last?.op !== "await") return [];
    state.reached = last.ticket;
    return [{ event: "reached", state: number, ticket: last.ticket }];
  }

  /** What was sent after these positions was lost. */
  #resume(variables: Record<number, number>, states: Record<number, number>): void {
    this.#answers = [];
    for (const [number, variable] of this.#variables) {
      const received = variables[number];
      if (received === undefined) {
        // The client knows its end, or has not sent its op again.
        assert.ok(variable.endArrived, `the client has forgotten variable ${number}`);
        continue;
      }
      assert.ok(received <= variable.position, `the client has more of ${number} than was sent`);
      variable.position = received;
      variable.hasEnded = false;
    }
    for (const [number, state] of this.#states) {
      const reached = states[number];
      if (reached === undefined) {
        // The client has its ends and sends its close again.
        const mine = [...this.#variables.values()].filter((one) => one.state === number);
        assert.ok(mine.every((one) => one.endArrived), `the client has forgotten state ${number}`);
      } else if (state.reached > reached) {
        this.#answers.push({ event: "reached", state: number, ticket: state.reached });
      }
    }
  }
}

/** A websocket of the client. Frames wait in both directions until `deliverUp` and `deliverDown`. */
export class FakeSocket implements WebSocketLike {
  bufferedAmount = 0;
  onopen: ((event: unknown) => void) | null = null;
  onmessage: ((event: { data: unknown }) => void) | null = null;
  onclose: ((event: { code: number; reason: string }) => void) | null = null;
  onerror: ((event: unknown) => void) | null = null;
  isOpen = false;
  hasEnded = false;
  readonly sent: ClientFrame[] = [];
  readonly #up: string[] = [];
  readonly #down: ServerFrame[] = [];

  constructor(
    readonly server: FakeServer,
    readonly url: string,
    readonly protocols: string[] | undefined,
  ) {
    server.sockets.push(this);
    queueMicrotask(() => {
      if (server.refusesConnections) return this.end(1006);
      this.isOpen = true;
      this.onopen?.({});
    });
  }

  send(data: string): void {
    assert.ok(this.isOpen && !this.hasEnded, "sent on a websocket that is not open");
    this.sent.push(JSON.parse(data) as ClientFrame);
    this.#up.push(data);
  }

  close(): void {
    queueMicrotask(() => this.end(1006));
  }

  get numUp(): number {
    return this.#up.length;
  }

  get numDown(): number {
    return this.#down.length;
  }

  down(frame: ServerFrame): void {
    if (!this.hasEnded) this.#down.push(frame);
  }

  deliverUp(): void {
    const frame = this.#up.shift();
    if (frame !== undefined && !this.hasEnded) this.server.handle(this, JSON.parse(frame) as ClientFrame);
  }

  deliverDown(): void {
    const frame = this.#down.shift();
    if (frame === undefined || this.hasEnded) return;
    this.server.arrived(frame);
    this.onmessage?.({ data: JSON.stringify(frame) });
  }

  /** The connection ends; frames on their way are lost. */
  end(code: number): void {
    if (this.hasEnded) return;
    this.hasEnded = true;
    this.isOpen = false;
    this.onclose?.({ code, reason: "" });
  }
}

/** Lets promises and due timers run. */
export function turn(): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, 0));
}

/** Carries everything both ways until nothing is left and `holds`. */
export async function settle(server: FakeServer, holds: () => boolean = () => true): Promise<void> {
  for (let round = 0; round < 10_000; round++) {
    await turn();
    const { socket } = server;
    if (socket.numUp) socket.deliverUp();
    else if (socket.numDown) socket.deliverDown();
    else if (holds()) return;
  }
  throw new Error("it does not settle");
}
