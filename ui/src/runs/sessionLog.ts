// What this page's session sent and received, as the lines of a recording.
//
// The lines stay in memory: the runs view shows them, and saves them as a file that `agentflow replay` reads.
import { signal } from "@preact/signals";

/** Beyond this the log ends: a recording with a gap could not be read. */
const MAX_LINES = 300_000;

export class SessionLog {
  readonly lines: object[] = [];
  isFull = false;

  /** Takes a line of the client. */
  readonly record = (line: object): void => {
    if (this.lines.length < MAX_LINES) this.lines.push(line);
    else this.isFull = true;
  };

  /** When the session began, for people. */
  get started(): string {
    const [header] = this.lines as readonly { readonly started?: string }[];
    return header?.started ? new Date(header.started).toLocaleTimeString("en-GB") : "";
  }

  /** The file's content. `isComplete`: nothing runs any more; else it ends like a truncated recording. */
  toBlob(isComplete: boolean): Blob {
    const last = this.lines[this.lines.length - 1] as { readonly at_s?: number } | undefined;
    const end = isComplete && !this.isFull ? [{ at_s: last?.at_s ?? 0, ending: "complete" }] : [];
    const parts = [...this.lines, ...end].map((line) => `${JSON.stringify(line)}\n`);
    return new Blob(parts, { type: "application/jsonl" });
  }
}

const MAX_SESSIONS = 8;

/** The logs of the page's sessions that have run something, the newest last. */
export const sessionLogs = signal<readonly SessionLog[]>([]);

/** The log that is shown: of the newest session that has run something, until another is chosen. */
export const sessionLog = signal(new SessionLog());

/** Begins the log of a new session; what `connect` takes as `record`. */
export function newSessionLog(): (line: object) => void {
  const log = new SessionLog();
  return (line) => {
    log.record(line);
    if (log.lines.length !== 2) return; // the first line is the header
    sessionLogs.value = [...sessionLogs.peek(), log].slice(-MAX_SESSIONS);
    sessionLog.value = log;
  };
}
