// States: what programs append to, fork and await.

import type { AgentflowError } from "./agentflow_error.js";
import { splitText } from "./code_points.js";
import type { EmbedFields } from "./embeddings.js";
import { BadArgument, ForeignState, NotSupported, StateClosed } from "./errors.js";
import { cancelOp, type CancelOptions } from "./failure.js";
import { genFields, type GenOptions } from "./gen_options.js";
import { Image, imageAt } from "./image.js";
import type {
  BeginOp,
  Conversation,
  DecideOp,
  EndOp,
  ForkOp,
  HintOp,
  LimitOp,
  Op,
  Question,
  ReadOp,
  Ref,
  SelectOp,
  ToolChoice,
  ToolSpec,
} from "./protocol.js";
import { messagesOf, Transcript, written, type ChatMessage, type Entry } from "./transcript.js";
import { Reference, Variable } from "./variable.js";

/** What can be appended as text: a text, a variable of the same session or graph, or a part of one. */
export type TextPart = string | Reference;

/** What can be appended to a turn: text, and images to turns of the user and of tools. */
export type Part = TextPart | Image;

// Longer texts are sent in several ops, because a frame has a limit.
const MAX_TEXT_CHARS = 256 * 1024;

/** Where the ops of a state go: to a session, or into a graph. */
export interface Link {
  /** Whether the ops are recorded for a graph and do not run. */
  readonly isRecording: boolean;
  /** A new number for a state or variable. */
  nextNumber(): number;
  /** `images`: those that the op refers to. */
  send(op: Op, images?: readonly Image[]): void;
  /** Throws if one of these ops cannot be sent, which are sent next: a turn is appended as a whole or not at all. */
  prepare(ops: readonly Op[], images: readonly Image[]): void;
  addState(state: State): void;
  addVariable(variable: Variable): void;
  /** The gen has no seed: one can be derived from its place. */
  addPlace(variable: Variable, place: string): void;
  /** Advice to the scheduler: the client waits for the variable, or reads it while it grows. */
  want(variable: number, how: "stream" | "value"): void;
  /** Whether the server still knows the state. */
  isOpen(state: State): boolean;
  dropState(state: State): void;
  /** Resolves when all earlier ops of the state are done. */
  done(state: State): Promise<void>;
}

type TurnOp = BeginOp | EndOp;

interface TurnPosition {
  readonly openRole?: string;
  /** A conversation opened that turn: the next reply or turn ends it. */
  readonly closesWithReply?: boolean;
  readonly lastRole?: string;
  /** Something was appended in the open turn, or after the last one. */
  readonly hasText?: boolean;
}

/** An op that appends text or an image, and what it appends. */
interface Content {
  readonly op: Op;
  readonly said: readonly Entry[];
  readonly images?: readonly Image[];
}

/** The content of one model's context, which grows with each op, and which can be forked. */
export class State {
  /** The state's number in its session or graph. */
  readonly number: number;
  /** The place in the fork tree: `[]` is the root, `[2]` its third branch, `[2, 0]` the first branch of that. */
  readonly path: readonly number[];
  /** The name of its model; undefined in a graph on the session's. */
  readonly model: string | undefined;
  readonly #link: Link;
  readonly #transcript: Transcript;
  #position: TurnPosition = {};
  #numBranches = 0;
  #numGens = 0;
  #error: AgentflowError | undefined;
  #isClosed = false;
  #isSealed = false;

  /** @internal */
  constructor(
    link: Link,
    number: number,
    path: readonly number[],
    model: string | undefined,
    position: unknown = {},
    transcript: unknown = new Transcript(),
  ) {
    this.#link = link;
    this.#transcript = transcript as Transcript;
    this.number = number;
    this.path = path;
    this.model = model;
    this.#position = position as TurnPosition;
    link.addState(this);
  }

  /** Whether the state belongs to a graph: its ops are recorded. */
  get isRecorded(): boolean {
    return this.#link.isRecording;
  }

  /** Why the state has failed. Later ops do not run. */
  get error(): AgentflowError | undefined {
    return this.#error;
  }

  /** Appends a turn of the system. */
  system(...parts: Part[]): this {
    return this.#turn("system", parts);
  }

  /** Appends a turn of the user. */
  user(...parts: Part[]): this {
    return this.#turn("user", parts);
  }

  /** Appends a turn of the assistant with these texts. */
  assistant(...parts: Part[]): this {
    return this.#turn("assistant", parts);
  }

  /** Appends a tool's turn: the answer to a call of a reply. */
  tool(call: { id?: string; name: string }, ...parts: Part[]): this {
    return this.#turn("tool", parts, call);
  }

  /** Appends text, as content: special tokens of the model in it stay text; or images. */
  text(...parts: Part[]): this {
    const contents = this.#contentsOf(parts, this.#position.openRole);
    if (contents.length > 1) this.#prepare(contents);
    return this.#append(contents);
  }

  /** Appends an image, in a turn of the user or of a tool. A text is an `https:` URL. */
  image(source: Image | string): this {
    return this.text(typeof source === "string" ? imageAt(source) : source);
  }

  /** The ops that append these parts to a turn of the role, or to the text outside the turns. */
  #contentsOf(parts: readonly Part[], role: string | undefined): Content[] {
    const contents: Content[] = [];
    let open: (string | Ref)[] = [];
    let said: TextPart[] = [];
    let room = MAX_TEXT_CHARS;
    const flush = (): void => {
      if (open.length) contents.push({ op: { op: "text", state: this.number, parts: open }, said });
      [open, said] = [[], []];
      room = MAX_TEXT_CHARS;
    };
    for (const part of parts) {
      if (part instanceof Image) {
        flush();
        checkImages(role);
        const op: Op = { op: "image", state: this.number, source: part.source };
        contents.push({ op, said: [part], images: [part] });
        continue;
      }
      for (const piece of typeof part === "string" ? splitText(part, MAX_TEXT_CHARS) : [this.#ref(part)]) {
        const size = typeof piece === "string" ? piece.length : 0;
        if (size > room) flush();
        room -= size;
        if (piece === "") continue;
        open.push(piece);
        said.push(typeof piece === "string" ? piece : (part as Reference));
      }
    }
    flush();
    return contents;
  }

  #prepare(contents: readonly Content[], before: readonly Op[] = []): void {
    this.#check();
    this.#link.prepare(
      [...before, ...contents.map(({ op }) => op)],
      contents.flatMap(({ images = [] }) => images),
    );
  }

  #append(contents: readonly Content[]): this {
    for (const { op, said, images } of contents) {
      this.#send(op, images);
      this.#said(...said);
    }
    return this;
  }

  /** Notes what was appended. */
  #said(...entries: readonly Entry[]): void {
    this.#transcript.add(...entries);
    if (!this.#position.hasText) this.#position = { ...this.#position, hasText: true };
  }

  /** Opens a turn; `end` closes it. */
  begin(role: BeginOp["role"], call: { id?: string; name?: string } = {}): this {
    return this.#open(this.#opening(role, call));
  }

  /**
   * The ops that open a turn. The turn that a conversation opened is the assistant's turn after it, and turns of other
   * roles end it.
   */
  #opening(role: BeginOp["role"], call: { id?: string; name?: string } = {}): TurnOp[] {
    const { openRole, closesWithReply, hasText } = this.#position;
    if (closesWithReply && role === "assistant" && !hasText) return [];
    const ops: TurnOp[] = closesWithReply && role !== "assistant" ? [this.#endOp()] : [];
    if (openRole !== undefined && !ops.length) {
      throw new BadArgument(`a ${role} turn cannot stand inside another turn: the ${openRole} turn is open`);
    }
    const op: BeginOp = { op: "begin", state: this.number, role };
    if (call.id !== undefined) op.tool_call_id = call.id;
    if (call.name !== undefined) op.name = call.name;
    return [...ops, op];
  }

  #open(ops: readonly TurnOp[]): this {
    if (!ops.length) this.#position = { openRole: "assistant" };
    for (const op of ops) {
      if (op.op === "end") this.end();
      else {
        this.#send(op);
        this.#transcript.add({ begin: op });
        this.#position = { openRole: op.role };
      }
    }
    return this;
  }

  /** Closes the open turn. */
  end(): this {
    this.#send(this.#endOp());
    this.#transcript.add({ end: true });
    this.#position = { lastRole: this.#position.openRole! };
    return this;
  }

  #endOp(): EndOp {
    const { openRole, closesWithReply, hasText } = this.#position;
    if (openRole === undefined) throw new BadArgument("there is no open turn to end");
    if (closesWithReply && !hasText) {
      throw new BadArgument(
        "the conversation waits for its answer: append a gen or assistant(…) first, or give all messages to converse",
      );
    }
    return { op: "end", state: this.number };
  }

  /**
   * Starts an empty state with a whole conversation, and opens the assistant's turn; if the last message is the
   * assistant's, its turn continues. A `gen` with `reply` ends the turn, `assistant` fills it, and a turn of another
   * role ends it if it is not empty. Without messages and tools, nothing is appended.
   */
  converse(messages: readonly ChatMessage[], tools: readonly ToolSpec[] = [], choice?: ToolChoice): this {
    if (this.#position.openRole !== undefined || this.#transcript.hasContent) {
      throw new BadArgument("converse: a conversation begins a state, and this one has content");
    }
    if (!messages.length && !tools.length) return this; // the first call of a page that keeps its history elsewhere
    const parts = messages.map(written);
    const conversation: Conversation = { messages: parts.map(([message]) => message) };
    if (tools.length) conversation.tools = [...tools];
    if (choice) conversation.choice = choice;
    const images = parts.flatMap(([, files]) => files);
    this.#send({ op: "converse", state: this.number, conversation }, images);
    this.#transcript.add({ messages: [...messages] });
    const hasText = messages.at(-1)?.role === "assistant";
    this.#position = { openRole: "assistant", closesWithReply: true, hasText };
    return this;
  }

  /** Sets the tools that later gens with `reply` may call. */
  tools(tools: readonly ToolSpec[], choice?: ToolChoice): this {
    this.#send({ op: "tools", state: this.number, tools: [...tools], ...(choice ? { choice } : {}) });
    this.#transcript.add({ tools, choice });
    return this;
  }

  /**
   * Generates text and appends it. In a state with turns, outside of them, it makes the assistant's turn.
   * Without a constraint the text is free.
   */
  gen(name: string, options: GenOptions = {}): Variable {
    const fields = genFields(options);
    const begin = this.#beginningOf(`gen(${JSON.stringify(name)})`, options.reply === true);
    const gen = (number: number): Op => ({ op: "gen", state: this.number, var: number, name, ...fields });
    const variable = this.#declare(name, gen, begin);
    if (fields.params.seed == null) this.#link.addPlace(variable, this.#seedPlace());
    this.#said(options.reply ? { replyOf: variable } : variable);
    this.#numGens++;
    if (begin.length || (options.reply && this.#position.closesWithReply)) this.end();
    return variable;
  }

  /** Appends the likeliest of several choices, which becomes the variable's value. */
  select(name: string, choices: readonly string[], options: { method?: SelectOp["method"] } = {}): Variable {
    const begin = this.#beginningOf(`select(${JSON.stringify(name)})`, false);
    const select = (number: number): Op => {
      const op: SelectOp = { op: "select", state: this.number, var: number, name, choices: [...choices] };
      if (options.method) op.method = options.method;
      return op;
    };
    const variable = this.#declare(name, select, begin);
    this.#said(variable);
    if (begin.length) this.end();
    return variable;
  }

  /**
   * Answers questions about the content at this point, each by itself, and appends nothing. The value is JSON: by the
   * name of each question its likeliest `value`, and the `probabilities` of all answers.
   */
  decide(name: string, questions: readonly Question[]): Variable {
    return this.#declare(name, (number): DecideOp => {
      return { op: "decide", state: this.number, var: number, name, questions: [...questions] };
    });
  }

  /** Sets a variable to a text, which is not appended. */
  set(name: string, ...parts: TextPart[]): Variable {
    const made = parts.map((part) => (typeof part === "string" ? part : this.#ref(part)));
    return this.#declare(name, (number) => ({ op: "set", state: this.number, var: number, name, parts: made }));
  }

  /** Reads the content at this point: its text with the template's markup, or its tokens as a JSON list. */
  read(name: string, what: ReadOp["what"]): Variable {
    return this.#declare(name, (number) => ({ op: "read", state: this.number, var: number, name, what }));
  }

  /**
   * The turns so far, which `converse` accepts. Waits for unfinished text; throws the error with which it failed.
   * Leaves out text outside turns.
   */
  messages(): Promise<ChatMessage[]> {
    return messagesOf(this.#transcript.entries(), (part) =>
      part instanceof Variable ? part : this.set("part of a message", part),
    );
  }

  /** @internal */
  embed(name: string, texts: string[], fields: EmbedFields): Variable {
    return this.#declare(name, (number) => ({ op: "embed", state: this.number, var: number, name, texts, ...fields }));
  }

  /**
   * Creates branches, 0 or more, which continue from here independently. On another `model` of the session they get
   * the content as text. Throws `NotSupported` if another model is to continue a conversation.
   */
  fork(count: number, options: { model?: string | undefined } = {}): State[] {
    if (!Number.isInteger(count) || count < 0) {
      throw new BadArgument(`fork: the number of branches must be a whole number, not ${count}`);
    }
    this.#check();
    if (count === 0) return [];
    const model = options.model ?? this.model;
    const content = model === this.model ? undefined : this.#portable();
    const children = Array.from({ length: count }, () => this.#link.nextNumber());
    const op: ForkOp = { op: "fork", state: this.number, children };
    if (content && model !== undefined) op.model = model;
    this.#send(op);
    return children.map((number) => {
      const path = [...this.path, this.#numBranches++];
      if (!content) return new State(this.#link, number, path, model, this.#position, new Transcript(this.#transcript));
      return new State(this.#link, number, path, model).#repeat(content);
    });
  }

  /** Makes a task group of branches of this state: when one fails, the others are cancelled and this fails. */
  taskGroup(branches: readonly State[]): this {
    const children = branches.map((branch) => branch.number);
    if (children.length) this.#send({ op: "taskgroup", state: this.number, children });
    return this;
  }

  /** Makes this state wait until all earlier ops of the others are done. Appends nothing. */
  join(...states: State[]): this {
    const ends = states.map((state) =>
      state.#declare(`the end of branch (${state.path.join(", ")})`, (number) => ({
        op: "done",
        state: state.number,
        var: number,
        name: "done",
      })),
    );
    if (ends.length) this.#send({ op: "text", state: this.number, parts: ends.map((end) => this.#ref(end)) });
    return this;
  }

  /** Describes the next ops to the scheduler. Does not change results. */
  hint(hint: { objective?: HintOp["objective"]; outputTokens?: number; forks?: number; deadlineS?: number }): this {
    const op: HintOp = { op: "hint", state: this.number };
    if (hint.objective) op.objective = hint.objective;
    if (hint.outputTokens !== undefined) op.output_tokens = hint.outputTokens;
    if (hint.forks !== undefined) op.forks = hint.forks;
    if (hint.deadlineS !== undefined) op.deadline_s = hint.deadlineS;
    this.#send(op);
    return this;
  }

  /** Limits the time and the output of the state and its forks from now on. */
  limit(limit: { deadlineS?: number; outputTokens?: number }): this {
    const op: LimitOp = { op: "limit", state: this.number };
    if (limit.deadlineS !== undefined) op.deadline_s = limit.deadlineS;
    if (limit.outputTokens !== undefined) op.output_tokens = limit.outputTokens;
    this.#send(op);
    return this;
  }

  /** Resolves when all earlier ops of the state are done; throws the error with which the state failed. */
  done(): Promise<void> {
    this.#check();
    return this.#link.done(this);
  }

  /**
   * Cancels the state and its forks. Their unfinished variables fail with `Cancelled`. A program that failed gives
   * its error as `failure`.
   */
  cancel(options: CancelOptions = {}): void {
    if (this.#link.isOpen(this)) this.#link.send(cancelOp(this.number, options));
  }

  /** Ends the state's text. Its variables, and `read`, stay usable. */
  seal(): this {
    this.#check();
    if (!this.#isSealed) this.#link.send({ op: "seal", state: this.number });
    this.#isSealed = true;
    return this;
  }

  /** Releases the state: the server forgets it when its variables are done. */
  close(): void {
    if (this.#isClosed) return;
    this.#isClosed = true;
    if (this.#link.isOpen(this)) {
      this.#link.send({ op: "close", state: this.number });
      this.#link.dropState(this);
    }
  }

  /** @internal */
  want(variable: Variable, how: "stream" | "value"): void {
    this.#link.want(variable.number, how);
  }

  /** @internal */
  fail(error: AgentflowError): void {
    this.#error ??= error;
  }

  /** The content, for another model. */
  #portable(): Entry[] {
    const content = this.#transcript.entries();
    if (content.some((entry) => typeof entry === "object" && ("messages" in entry || "replyOf" in entry))) {
      throw new NotSupported(
        "fork: another model reads a conversation only as messages: begin a state with converse(await state.messages())",
        { param: "model" },
      );
    }
    return content;
  }

  /** Appends the content of another state. */
  #repeat(content: readonly Entry[]): this {
    let parts: Part[] = [];
    const flush = (): void => {
      if (parts.length) this.text(...parts);
      parts = [];
    };
    for (const entry of content) {
      if (typeof entry === "string" || entry instanceof Reference || entry instanceof Image) {
        parts.push(entry);
        continue;
      }
      flush();
      if ("begin" in entry) {
        const { role, tool_call_id, name } = entry.begin;
        this.begin(role, { ...(tool_call_id == null ? {} : { id: tool_call_id }), ...(name == null ? {} : { name }) });
      } else if ("end" in entry) this.end();
      else if ("tools" in entry) this.tools(entry.tools, entry.choice);
    }
    flush();
    return this;
  }

  /** The place of the next gen, as programs in Python write it: their seeds are the same. */
  #seedPlace(): string {
    const path = this.path.length === 1 ? `${this.path[0]},` : this.path.join(", ");
    return `(${path})/${this.#numGens}`;
  }

  #turn(role: BeginOp["role"], parts: Part[], call?: { id?: string; name: string }): this {
    const begin = this.#opening(role, call);
    const contents = this.#contentsOf(parts, role);
    this.#prepare(contents, begin);
    return this.#open(begin).#append(contents).end();
  }

  /** The ops that open the assistant's turn for a gen or select that stands outside of the turns. */
  #beginningOf(what: string, isReply: boolean): TurnOp[] {
    const { openRole, lastRole, hasText } = this.#position;
    if (openRole !== undefined) {
      if (isReply && openRole !== "assistant") {
        throw new BadArgument(`${what}: the ${openRole} turn is open: end it first`);
      }
      return [];
    }
    if (!isReply) {
      if (lastRole === undefined) return [];
      if (hasText) throw new BadArgument(`${what} follows text outside the turns: put both into one turn`);
      if (lastRole === "assistant") {
        throw new BadArgument(`${what} follows the end of the assistant's turn: append a user's turn first`);
      }
    }
    return this.#opening("assistant");
  }

  /** `begin`: is sent before the op, if all can be sent. */
  #declare(name: string, opOf: (number: number) => Op, begin: readonly TurnOp[] = []): Variable {
    this.#check();
    const number = this.#link.nextNumber();
    const variable = new Variable(this, number, name);
    const op = opOf(number);
    if (begin.length) {
      this.#prepare([{ op, said: [] }], begin);
      this.#open(begin);
    }
    this.#send(op);
    this.#link.addVariable(variable);
    return variable;
  }

  #ref(part: Reference): Ref {
    const variable = part.target();
    if (variable.state.#link !== this.#link) {
      throw new ForeignState(`${variable.name} belongs to another session or graph: await it and append its value`);
    }
    variable.isUsed = true;
    return part.transforms.length
      ? { op: "ref", var: variable.number, transforms: part.transforms }
      : { op: "ref", var: variable.number };
  }

  #send(op: Op, images?: readonly Image[]): void {
    this.#check();
    if (this.#isSealed && op.op !== "read" && op.op !== "set" && op.op !== "done") {
      const where = `state (${this.path.join(", ")})`;
      throw new StateClosed(`${where} is sealed: nothing can be appended to it`, { reason: "sealed" });
    }
    this.#link.send(op, images);
  }

  #check(): void {
    if (this.#isClosed) throw new StateClosed(`state (${this.path.join(", ")}) is closed`, { reason: "ended" });
  }
}

function checkImages(role: string | undefined): void {
  if (role !== undefined && role !== "user" && role !== "tool") {
    throw new BadArgument(`image: turns of the user and of tools have images, and not those of the ${role}`);
  }
}
