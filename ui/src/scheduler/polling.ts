// Requests that are repeated while a view is shown.
import { useSignalEffect } from "@preact/signals";
import { useRef } from "preact/hooks";
import { session } from "../app/session";

/** Calls `poll` in a session, and again `intervalMs` after its end, unless `isPaused` or the page is hidden.
 *  `signal`: the view is gone, or the session is another one. */
export function usePolling(
  isPaused: boolean,
  intervalMs: number,
  poll: (signal: AbortSignal) => Promise<void>,
): void {
  const paused = useRef(isPaused);
  paused.current = isPaused;
  useSignalEffect(() => {
    if (session.value === null) return;
    const abort = new AbortController();
    let timer: ReturnType<typeof setTimeout>;
    const turn = async (): Promise<void> => {
      if (!paused.current && document.visibilityState === "visible") await poll(abort.signal);
      if (!abort.signal.aborted) timer = setTimeout(() => void turn(), intervalMs);
    };
    void turn();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  });
}
