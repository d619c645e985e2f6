// The state of the connection: a quiet word in the header while all is well, else a sentence with a way on.
import { open, status, trouble, type ServerStatus } from "./session";
import { askForKey } from "./KeyPrompt";

interface Line {
  text: string;
  action?: { label: string; run: () => void };
}

export function lineOf(now: ServerStatus): Line | null {
  const reconnect = { label: "Try now", run: () => void open() };
  switch (now.kind) {
    case "open":
    case "connecting":
      return null;
    case "lost":
      return { text: "The connection was lost. Reconnecting; nothing that was streamed is lost." };
    case "renewing":
      return { text: "The server has ended the session. A new one begins; what was streamed stays here.", action: reconnect };
    case "unreachable":
      return {
        text: "The server does not answer. What was streamed stays here; the page keeps trying.",
        action: reconnect,
      };
    case "unready":
      return {
        text: `Not ready: ${now.reason.replace(/: try again.*$/, "")}. The page keeps trying.`,
        action: reconnect,
      };
    case "key":
      return {
        text: now.wasWrong ? "The server does not accept this API key." : "This server needs an API key.",
        action: { label: "Enter a key", run: askForKey },
      };
    case "ended":
      return {
        text: `The session has ended${now.reason && `: ${now.reason}`}. What was streamed stays here.`,
        action: { label: "Start a new session", run: () => void open() },
      };
  }
}

const WORDS: Record<ServerStatus["kind"], string> = {
  open: "Connected",
  connecting: "Connecting",
  lost: "Reconnecting",
  renewing: "Reconnecting",
  unreachable: "Offline",
  unready: "Not ready",
  key: "Needs a key",
  ended: "Session ended",
};

/** In the header; tests read its `data-status`. */
export function StatusWord() {
  const { kind } = status.value;
  return (
    <span class={`status-word is-${kind}`} data-testid="status" data-status={kind}>
      <span class="status-dot" aria-hidden="true" />
      {WORDS[kind]}
    </span>
  );
}

export function StatusBar() {
  const line = lineOf(status.value);
  const problem = trouble.value;
  return (
    <div class="status-bar" role="status">
      {line && (
        <p class="status-line" data-testid="status-line">
          <span>{line.text}</span>
          {line.action && (
            <button type="button" class="quiet flush" onClick={line.action.run}>
              {line.action.label}
            </button>
          )}
        </p>
      )}
      {problem && (
        <p class="status-line" data-testid="trouble">
          <span dir="auto">{problem.text}</span>
          {problem.again && (
            <button
              type="button"
              class="quiet flush"
              onClick={() => {
                trouble.value = null;
                problem.again?.();
              }}
            >
              Try again
            </button>
          )}
          <button type="button" class={problem.again ? "quiet" : "quiet flush"} onClick={() => (trouble.value = null)}>
            Dismiss
          </button>
        </p>
      )}
    </div>
  );
}
