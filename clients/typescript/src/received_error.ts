// Errors that the server reports.

import { AgentflowError } from "./agentflow_error.js";
import { ERRORS } from "./errors.js";
import type { ErrorInfo } from "./protocol.js";

const MAX_CAUSES = 16;

/** The error of the class of its code, with its causes. An unknown code gives an `AgentflowError`. */
export function receivedError(info: ErrorInfo, depth = 1): AgentflowError {
  const kind = Object.hasOwn(ERRORS, info.code) ? ERRORS[info.code]! : AgentflowError;
  return new kind(info.message, {
    code: info.code,
    cause: info.cause && depth < MAX_CAUSES ? receivedError(info.cause, depth + 1) : undefined,
    retryAfterS: info.retry_after_s ?? undefined,
    param: info.param ?? undefined,
    reason: info.reason ?? undefined,
    place: info.state != null && info.op != null ? [info.state, info.op] : undefined,
  });
}
