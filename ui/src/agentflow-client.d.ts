// The interface of clients/typescript, until its sources are here.
declare module "agentflow-client" {
  export interface Usage {
    prompt_tokens: number;
    cached_tokens: number;
    output_tokens: number;
    forced_tokens?: number;
  }
  export interface GenOptions {
    maxTokens?: number;
    temperature?: number;
    topP?: number;
    seed?: number;
    stop?: string | string[];
    schema?: object;
    regex?: string;
    choices?: string[];
    logprobs?: boolean;
    reply?: boolean;
  }
  export type Role = "system" | "user" | "assistant" | "tool";
  export class Variable implements PromiseLike<string>, AsyncIterable<string> {
    then<A, B>(ok?: ((v: string) => A | PromiseLike<A>) | null, no?: ((e: unknown) => B | PromiseLike<B>) | null): Promise<A | B>;
    [Symbol.asyncIterator](): AsyncIterator<string>;
    readonly name: string;
    readonly text: string;
    readonly done: boolean;
    readonly usage: Usage | null;
    readonly finishReason: string | null;
    readonly choices: Record<string, number> | null;
    readonly logprobs: number[] | null;
    readonly forced: [number, number][] | null;
    readonly error: AgentflowError | null;
    onChange(callback: () => void): () => void;
  }
  export interface GraphState {
    system(...text: (string | Variable)[]): this;
    user(...text: (string | Variable)[]): this;
    assistant(...text: (string | Variable)[]): this;
    text(...parts: (string | Variable)[]): this;
    begin(role: Role): this;
    end(): this;
    gen(name: string, options?: GenOptions): Variable;
    select(name: string, choices: string[]): Variable;
    read(name: string, what: "text" | "token_ids" | "tokens"): Variable;
    fork(count: number): this[];
    converse(messages: object[], tools?: object[]): this;
    append(variable: Variable): this;
  }
  export interface State extends GraphState {
    done(): Promise<void>;
    cancel(): void;
    seal(): void;
    close(): void;
  }
  export class Graph {
    constructor(options?: { program?: string });
    readonly root: GraphState;
  }
  export interface Run {
    variable(v: Variable): Variable;
    done(): Promise<void>;
    cancel(): void;
    cancelBranch(state: GraphState): void;
  }
  export type SessionStatus = "connecting" | "open" | "lost" | "closed";
  export interface Session {
    readonly model: string;
    readonly capabilities: { model: string; constraints?: string[]; conversations?: boolean; max_context?: number | null };
    readonly status: SessionStatus;
    onStatus(callback: (status: SessionStatus) => void): () => void;
    state(options?: { program?: string; cacheSalt?: string }): State;
    submit(graph: Graph, options?: { outputs?: Variable[]; live?: boolean }): Run;
    stats(): Promise<Record<string, number>>;
    watch(options?: {
      steps?: boolean;
      tree?: boolean;
      intervalS?: number;
      maxNodes?: number;
      signal?: AbortSignal;
    }): AsyncIterable<any>;
    peek(node: number): Promise<{ text: string; num_tokens: number }>;
    close(): Promise<void>;
  }
  export class AgentflowError extends Error {
    readonly code: string;
    readonly retryAfterS?: number;
  }
  export function connect(options?: {
    url?: string;
    key?: string;
    ticket?: () => Promise<string | undefined>;
    model?: string;
    signal?: AbortSignal;
  }): Promise<Session>;
}
