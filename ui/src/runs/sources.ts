// Where the runs come from: a file, or this page's session while it goes on.
import { signal, useSignalEffect } from "@preact/signals";
import { useState } from "preact/hooks";
import { readFile, type ReadFile } from "./file";
import { RecordingReader } from "./recording";
import { sessionLog } from "./sessionLog";

export type Opened =
  | { readonly kind: "session" }
  | { readonly kind: "reading"; readonly name: string; readonly share: number; readonly cancel: () => void }
  | { readonly kind: "file"; readonly file: ReadFile }
  | { readonly kind: "failed"; readonly problem: string };

/** What the view shows. It outlives the view, so that a file stays open while others are looked at. */
export const opened = signal<Opened>({ kind: "session" });

/** Shows the runs of this page's session. A file that is being read is read no further. */
export function showSession(): void {
  const before = opened.peek();
  if (before.kind === "reading") before.cancel();
  opened.value = { kind: "session" };
}

/** Reads the file and shows it. */
export async function openFile(file: File): Promise<void> {
  showSession();
  const abort = new AbortController();
  const reading = (share: number): void => {
    if (abort.signal.aborted) return; // something else is shown
    opened.value = { kind: "reading", name: file.name, share, cancel: () => abort.abort() };
  };
  reading(0);
  try {
    const read = await readFile(file, { signal: abort.signal, onProgress: reading });
    if (abort.signal.aborted) return;
    opened.value = read.isRecording
      ? { kind: "file", file: read }
      : { kind: "failed", problem: read.problem ?? "" };
  } catch {
    if (abort.signal.aborted) return;
    opened.value = {
      kind: "failed",
      problem: `${file.name} cannot be read: the browser has no access to it any more.`,
    };
  }
}

const INTERVAL_MS = 500;

/** The runs of this page's session. The reader is the same object as long as the session is; `version` changes
 * with its content. */
export interface SessionRuns {
  readonly reader: RecordingReader;
  readonly version: number;
  readonly isFull: boolean;
}

/** Follows the session's log, twice a second. */
export function useSessionRuns(): SessionRuns {
  const [runs, setRuns] = useState<SessionRuns>(() => ({
    reader: new RecordingReader(),
    version: 0,
    isFull: false,
  }));
  useSignalEffect(() => {
    const log = sessionLog.value;
    const reader = new RecordingReader();
    let read = 0;
    let isFull = false;
    const follow = (): void => {
      if (read > 0 && read === log.lines.length && isFull === log.isFull) return;
      isFull = log.isFull;
      for (; read < log.lines.length; read++) reader.read(log.lines[read]);
      reader.finish();
      setRuns({ reader, version: read, isFull });
    };
    follow();
    const timer = setInterval(follow, INTERVAL_MS);
    return () => clearInterval(timer);
  });
  return runs;
}
