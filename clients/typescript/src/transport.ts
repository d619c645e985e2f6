// Opens websockets to a server: its address, the ticket of a key, and the greeting.

import { AgentflowError } from "./agentflow_error.js";
import {
  BadArgument,
  NotAuthorized,
  Overloaded,
  ProtocolError,
  RateLimited,
  ServerUnreachable,
} from "./errors.js";
import {
  SESSION_PATH,
  VERSION,
  type HelloFrame,
  type Resume,
  type ServerFrame,
  type WelcomeFrame,
} from "./protocol.js";
import { receivedError } from "./received_error.js";

const SUBPROTOCOL = "agentflow.v2";
const TICKET_PROTOCOL = "agentflow.ticket.";
const MAX_REASON_CHARS = 500;

/** What the client uses of a websocket. Those of browsers, of Node.js 22 and of the package `ws` have it. */
export interface WebSocketLike {
  readonly bufferedAmount: number;
  onopen: ((event: any) => void) | null;
  onmessage: ((event: any) => void) | null;
  onclose: ((event: any) => void) | null;
  onerror: ((event: any) => void) | null;
  send(data: string): void;
  close(code?: number, reason?: string): void;
}

/** A class of websockets. */
export type WebSocketConstructor = new (url: string, protocols?: string[]) => WebSocketLike;

/** Where a server is, and how to open a session on it. */
export interface TransportOptions {
  url?: string | undefined;
  key?: string | undefined;
  ticket?: (() => Promise<string | undefined>) | undefined;
  model?: string | undefined;
  openTimeoutS: number;
  WebSocket?: WebSocketConstructor | undefined;
}

/** The end of a websocket. `code`: of its close frame. */
export interface SocketEnd {
  code: number;
  reason: string;
}

/** An open websocket. What arrives while nothing listens is kept. */
export class Socket {
  #onframe: ((frame: ServerFrame) => void) | undefined;
  #onend: ((end: SocketEnd) => void) | undefined;
  #frames: ServerFrame[] = [];
  #ended: SocketEnd | undefined;

  constructor(readonly raw: WebSocketLike) {
    raw.onmessage = (event: { data: unknown }) => {
      if (this.#ended) return;
      this.#frames.push(parsed(event.data));
      this.#deliver();
    };
    raw.onclose = (event: { code?: number; reason?: string }) =>
      this.#end({ code: event.code ?? 1006, reason: event.reason ?? "" });
    raw.onerror = () => {}; // the close event follows
  }

  /** From now on, `onframe` gets each frame, and `onend` the end, once. */
  listen(onframe: (frame: ServerFrame) => void, onend: (end: SocketEnd) => void): void {
    this.#onframe = onframe;
    this.#onend = onend;
    this.#deliver();
  }

  /** Keeps what arrives until the next `listen`. */
  pause(): void {
    this.#onframe = this.#onend = undefined;
  }

  /** The bytes that wait to be sent. */
  get bufferedAmount(): number {
    return this.raw.bufferedAmount || 0;
  }

  send(text: string): void {
    if (!this.#ended) this.raw.send(text);
  }

  /** Closes the websocket. Its end is reported at once, because the peer may not answer. */
  close(end: SocketEnd = { code: 1006, reason: "closed by the client" }): void {
    drop(this.raw);
    this.#end(end);
  }

  /** Closes the websocket, and reports its end when the server has answered. */
  closeGently(): void {
    this.raw.close(1000);
  }

  #end(end: SocketEnd): void {
    this.#ended ??= end;
    this.#deliver();
  }

  #deliver(): void {
    while (this.#onframe && this.#frames.length) this.#onframe(this.#frames.shift()!);
    if (this.#ended && this.#onend) {
      const onend = this.#onend;
      this.pause();
      onend(this.#ended);
    }
  }
}

/** Opens the websockets of one session. */
export class Transport {
  readonly url: string;
  readonly #httpUrl: string;
  readonly #options: TransportOptions;
  readonly #WebSocket: WebSocketConstructor;

  constructor(options: TransportOptions) {
    const url = addressOf(options.url);
    this.url = url.href;
    this.#httpUrl = httpAddressOf(url);
    this.#options = options;
    const kind = options.WebSocket ?? (globalThis.WebSocket as WebSocketConstructor | undefined);
    if (!kind) {
      throw new BadArgument(
        "this JavaScript engine has no WebSocket: pass a class, such as that of the package ws, as the option WebSocket",
      );
    }
    this.#WebSocket = kind;
  }

  /**
   * A new websocket, after `hello` and `welcome`. Throws `ServerUnreachable` if no server answers, or the
   * error with which it rejects the client: `NotAuthorized`, `Overloaded`, `RateLimited`.
   */
  async open(resume: Resume | undefined, signal?: AbortSignal): Promise<[Socket, WelcomeFrame]> {
    const limit = new AbortController();
    const abort = (): void => limit.abort(signal?.reason);
    signal?.addEventListener("abort", abort);
    const timer = setTimeout(
      () =>
        limit.abort(
          new ServerUnreachable(
            `${this.url} did not answer within ${this.#options.openTimeoutS} s: it may be overloaded or still starting`,
          ),
        ),
      this.#options.openTimeoutS * 1000,
    );
    try {
      signal?.throwIfAborted();
      const ticket = await this.#ticket(resume?.session, limit.signal);
      const protocols = ticket === undefined ? undefined : [SUBPROTOCOL, TICKET_PROTOCOL + ticket];
      const socket = await this.#connect(protocols, resume?.session, limit.signal);
      return [socket, await this.#greet(socket, resume, limit.signal)];
    } catch (error) {
      if (limit.signal.aborted) throw limit.signal.reason;
      throw error;
    } finally {
      clearTimeout(timer);
      signal?.removeEventListener("abort", abort);
    }
  }

  /** The parameter by which a gateway finds a server: the session to resume, or the model of a new one. */
  #param(session: string | undefined): [string, string] | undefined {
    if (session !== undefined) return ["session", session];
    return this.#options.model === undefined ? undefined : ["model", this.#options.model];
  }

  /** `session`: the one to resume. A gateway gets the ticket from its server, which alone accepts it. */
  async #ticket(session: string | undefined, signal: AbortSignal): Promise<string | undefined> {
    const { ticket: ask } = this.#options;
    if (ask) return this.#askForTicket(ask, signal);
    if (this.#options.key === undefined) return undefined;
    const param = this.#param(session);
    const query = param ? `?${new URLSearchParams([param]).toString()}` : "";
    const response = await this.#request("POST", `/v1/session-ticket${query}`, signal);
    const error = await this.#errorOf(response);
    if (error) throw error;
    let answer: unknown;
    try {
      answer = await response.json();
    } catch (error) {
      // The connection broke within the body, or a network's sign-in page has answered.
      throw new ServerUnreachable(`${this.#httpUrl} sent no ticket`, { cause: error });
    }
    const ticket = (answer as { ticket?: unknown } | null)?.ticket;
    if (typeof ticket !== "string") throw new ProtocolError(`${this.#httpUrl} sent no ticket`);
    return ticket;
  }

  /** A ticket of the program's callback, which may fail while the network is away, or never answer. */
  async #askForTicket(ask: () => Promise<string | undefined>, signal: AbortSignal): Promise<string | undefined> {
    let stop: () => void = () => {};
    const aborted = new Promise<never>((_, reject) => {
      stop = () => reject(signal.reason);
      signal.addEventListener("abort", stop, { once: true });
    });
    try {
      return await Promise.race([ask(), aborted]);
    } catch (error) {
      signal.throwIfAborted();
      if (error instanceof AgentflowError) throw error;
      throw new ServerUnreachable(`no ticket for ${this.url}: ${String(error)}`, { cause: error });
    } finally {
      signal.removeEventListener("abort", stop);
    }
  }

  async #request(method: string, path: string, signal: AbortSignal): Promise<Response> {
    const { key } = this.#options;
    try {
      return await fetch(this.#httpUrl + path, {
        method,
        headers: key === undefined ? {} : { Authorization: `Bearer ${key}` },
        cache: "no-store",
        credentials: "omit",
        signal,
      });
    } catch (error) {
      signal.throwIfAborted();
      throw new ServerUnreachable(`no server answers at ${this.#httpUrl}`, { cause: error });
    }
  }

  /** The error of a response without success. */
  async #errorOf(response: Response): Promise<AgentflowError | undefined> {
    const { status } = response;
    if (response.ok) return undefined;
    const why = (await reasonOf(response)) || "no reason given";
    const retryAfterS = Number.parseFloat(response.headers.get("Retry-After") ?? "") || undefined;
    if (status === 401) {
      return new NotAuthorized(`${this.#httpUrl} requires a valid API key (HTTP 401): ${why}`);
    }
    if (status === 403) return new NotAuthorized(`${this.#httpUrl} denies access (HTTP 403): ${why}`);
    if (status === 429) return new RateLimited(`${this.#httpUrl}: ${why}`, { retryAfterS });
    if (status === 503) {
      return new Overloaded(`${this.#httpUrl} accepts no sessions now: ${why}`, { retryAfterS });
    }
    return new ServerUnreachable(
      `${this.#httpUrl} is not an agentflow server (HTTP ${status}): check the address`,
    );
  }

  /** `session`: the id of the session that is resumed, by which a proxy finds the server that has it. */
  #connect(protocols: string[] | undefined, session: string | undefined, signal: AbortSignal): Promise<Socket> {
    return new Promise((resolve, reject) => {
      let raw: WebSocketLike;
      const address = new URL(this.url);
      const param = this.#param(session);
      if (param) address.searchParams.set(...param);
      const url = param ? address.href : this.url;
      try {
        raw = protocols ? new this.#WebSocket(url, protocols) : new this.#WebSocket(url);
      } catch (error) {
        throw new ServerUnreachable(`a websocket to ${this.url} cannot be opened: ${String(error)}`, {
          cause: error,
        });
      }
      const abandon = (): void => {
        drop(raw);
        reject(signal.reason);
      };
      signal.addEventListener("abort", abandon, { once: true });
      raw.onopen = () => {
        signal.removeEventListener("abort", abandon);
        resolve(new Socket(raw));
      };
      raw.onerror = () => {}; // the close event follows
      raw.onclose = () => {
        signal.removeEventListener("abort", abandon);
        if (session === undefined) this.#whyRejected(signal).then(reject, reject);
        else reject(new ServerUnreachable(`no server answers at ${this.url}`));
      };
    });
  }

  /** Why the handshake failed, which browsers do not report: a plain request gets the same answer. */
  async #whyRejected(signal: AbortSignal): Promise<AgentflowError> {
    const error = await this.#errorOf(await this.#request("GET", "/v1/models", signal));
    return error ?? new ServerUnreachable(`${this.url} rejects websockets: a proxy may not carry them`);
  }

  #greet(socket: Socket, resume: Resume | undefined, signal: AbortSignal): Promise<WelcomeFrame> {
    return new Promise<WelcomeFrame>((resolve, reject) => {
      const fail = (error: unknown): void => {
        signal.removeEventListener("abort", abandon);
        drop(socket.raw);
        reject(error);
      };
      const abandon = (): void => fail(signal.reason);
      signal.addEventListener("abort", abandon, { once: true });
      const receive = (frame: ServerFrame): void => {
        socket.pause();
        if (frame.frame === "refused") return fail(receivedError(frame.error));
        if (frame.frame !== "welcome") return fail(unexpected(frame, "a welcome frame"));
        if (frame.version !== VERSION) {
          return fail(
            new ProtocolError(
              `the server at ${this.url} uses version ${frame.version} of the protocol and this client version ${VERSION}`,
            ),
          );
        }
        signal.removeEventListener("abort", abandon);
        return resolve(frame);
      };
      socket.listen(receive, ({ code, reason }) =>
        fail(new ServerUnreachable(`${this.url} closed the connection before it answered: ${code} ${reason}`)),
      );
      const hello: HelloFrame = { frame: "hello", version: VERSION };
      if (resume) hello.resume = resume;
      if (this.#options.model !== undefined) hello.model = this.#options.model;
      socket.send(JSON.stringify(hello));
    });
  }
}

/** The error for a frame that was not expected. */
export function unexpected(frame: ServerFrame, expected: string): ProtocolError {
  return new ProtocolError(`expected ${expected} from the server, received ${JSON.stringify(frame).slice(0, 80)}`);
}

/** Closes a websocket of which nothing more is wanted. */
function drop(raw: WebSocketLike): void {
  raw.onopen = raw.onmessage = raw.onclose = null;
  raw.onerror = () => {};
  try {
    raw.close();
  } catch {
    // It has ended already.
  }
}

function parsed(data: unknown): ServerFrame {
  try {
    const frame: unknown = JSON.parse(data as string);
    if (typeof frame === "object" && frame !== null) return frame as ServerFrame;
  } catch {
    // Rejected below, like any other frame of an unknown kind.
  }
  return { frame: String(data).slice(0, 40) } as unknown as ServerFrame;
}

function addressOf(given: string | undefined): URL {
  const own = (globalThis as { location?: { href: string } }).location?.href;
  const text = given ?? own;
  if (text === undefined) throw new BadArgument("connect: give the url of a server, such as ws://127.0.0.1:8410");
  let url: URL;
  try {
    url = given === undefined ? new URL("/", text) : new URL(text, own);
  } catch {
    throw new BadArgument(`connect: ${JSON.stringify(given)} is not the url of a server`);
  }
  const scheme = { "http:": "ws:", "https:": "wss:", "ws:": "ws:", "wss:": "wss:" }[url.protocol];
  if (!scheme) throw new BadArgument(`connect: the url of a server begins with ws, wss, http or https`);
  if (url.username || url.password) throw new BadArgument("connect: give the key as an option, not in the url");
  const plain = url.href.replace(/^[a-z]+:/, scheme).replace(/#.*$/, "");
  url = new URL(plain);
  if (url.pathname === "/") url.pathname = SESSION_PATH;
  return url;
}

/** The address of the HTTP interface; a reverse proxy may put both below a common path. */
function httpAddressOf(url: URL): string {
  const path = url.pathname.endsWith(SESSION_PATH) ? url.pathname.slice(0, -SESSION_PATH.length) : "";
  return `${url.protocol === "wss:" ? "https:" : "http:"}//${url.host}${path}`;
}

/** The reason in a body of JSON or plain text, as one line. */
async function reasonOf(response: Response): Promise<string> {
  const text = await response.text().catch(() => "");
  let reason: unknown = text;
  try {
    reason = JSON.parse(text);
  } catch {
    if (!response.headers.get("Content-Type")?.startsWith("text/plain")) return "";
  }
  for (let depth = 0; depth < 2 && typeof reason === "object" && reason !== null; depth++) {
    const body = reason as Record<string, unknown>;
    reason = body["reason"] ?? body["error"] ?? body["message"] ?? body["detail"];
  }
  return typeof reason === "string" ? reason.replace(/\s+/g, " ").slice(0, MAX_REASON_CHARS) : "";
}
