// Why a program cancels its run.

import { Cancelled } from "./errors.js";
import type { CancelOp } from "./protocol.js";

/** Options of `cancel`. */
export interface CancelOptions {
  /**
   * The error with which the program failed: recordings show the run as failed, with the error's name and message.
   * An `AbortError` and `Cancelled` are none.
   */
  failure?: unknown;
}

/** The largest size of each text of a failure, in UTF-8. */
const MAX_BYTES = 1000;

/** The op that cancels a state. */
export function cancelOp(state: number, { failure }: CancelOptions = {}): CancelOp {
  const isNone = failure === undefined || failure instanceof Cancelled;
  if (isNone || (failure instanceof Error && failure.name === "AbortError")) return { op: "cancel", state };
  const isError = failure instanceof Error;
  const type = shortened(isError ? failure.name : typeof failure);
  const message = shortened(isError ? failure.message : failure);
  return { op: "cancel", state, failure: message ? { type, message } : { type } };
}

/** The text up to the last whole character that fits. */
function shortened(value: unknown): string {
  let text: string;
  try {
    text = String(value);
  } catch {
    return ""; // a program may throw anything
  }
  const bytes = new TextEncoder().encode(text.slice(0, MAX_BYTES)).subarray(0, MAX_BYTES);
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes, { stream: true });
}
