// The base of all errors.

/** Base of all errors of this package and of the server. `errors.ts` has a class for each code. */
export class AgentflowError extends Error {
  static readonly code: string = "error";

  /** The error's name in the protocol, such as `not_authorized`. */
  readonly code: string;
  /** The number of seconds after which to try again, of `overloaded` and `rate_limited`, if known. */
  readonly retryAfterS: number | undefined;
  /** The name of the argument that is wrong, if the error concerns one. */
  readonly param: string | undefined;
  /** Of `state_closed`: why nothing can be appended, if known. */
  readonly reason: "sealed" | "cancelled" | "ended" | undefined;
  /** The op that failed: the number of its state, and its own number in that state, from 1. */
  readonly place: readonly [state: number, op: number] | undefined;

  constructor(
    message: string,
    options: {
      cause?: unknown;
      code?: string | undefined;
      retryAfterS?: number | undefined;
      param?: string | undefined;
      reason?: "sealed" | "cancelled" | "ended" | undefined;
      place?: readonly [number, number] | undefined;
    } = {},
  ) {
    super(message, options.cause === undefined ? undefined : { cause: options.cause });
    this.code = options.code ?? new.target.code;
    this.name = new.target.name;
    this.retryAfterS = options.retryAfterS;
    this.param = options.param;
    this.reason = options.reason;
    this.place = options.place;
  }
}
