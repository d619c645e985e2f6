// Reads a recording from a file in slices, so that the page stays responsive while a large one is read.

import { count } from "../charts/numbers";
import { FORMAT_VERSION, RecordingReader } from "./recording";

export interface ReadOptions {
  /** Called after each slice with the share that was read, 0 to 1. */
  readonly onProgress?: (share: number) => void;
  readonly signal?: AbortSignal;
  /** The longest time between two pauses, in milliseconds. */
  readonly sliceMs?: number;
  /** Gives the page time for other work. */
  readonly pause?: () => Promise<void>;
}

/** What could be read. `problem`: one sentence if that is not the whole of it. `isRecording`: false if the file has
 * nothing that a recording has. */
export interface ReadFile {
  readonly name: string;
  readonly reader: RecordingReader;
  readonly problem: string | null;
  readonly isRecording: boolean;
}

const CHUNK_BYTES = 256 * 1024;
/** A file without a single readable line among its first ones is no recording: the rest is not read. */
const MAX_UNREAD_FIRST = 200;

/** Reads the file. Rejects only if it is aborted, or if the browser cannot read the file. */
export async function readFile(file: File, options: ReadOptions = {}): Promise<ReadFile> {
  const { onProgress, signal, sliceMs = 10, pause = nextTask } = options;
  const reader = new RecordingReader();
  const decoder = new TextDecoder();
  let rest = "";
  let isGivenUp = false;
  let sliceEnd = performance.now() + sliceMs;
  const isOver = (): boolean => performance.now() >= sliceEnd;
  const breathe = async (share: number): Promise<void> => {
    onProgress?.(share);
    await pause();
    signal?.throwIfAborted();
    sliceEnd = performance.now() + sliceMs;
  };
  for (let at = 0; at < file.size && !isGivenUp; at += CHUNK_BYTES) {
    const bytes = await file.slice(at, at + CHUNK_BYTES).arrayBuffer();
    const lines = (rest + decoder.decode(bytes, { stream: true })).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) {
      reader.readText(line);
      if (isOver()) await breathe(at / file.size);
    }
    isGivenUp = reader.numRead === 0 && reader.numUnread >= MAX_UNREAD_FIRST;
  }
  rest += decoder.decode();
  for (const _ of reader.finishing()) {
    if (isOver()) await breathe(1);
  }
  onProgress?.(1);
  const isRecording = reader.header !== null || reader.numRead > 0;
  return { name: file.name, reader, problem: problemOf(file, reader, rest !== "", isRecording), isRecording };
}

/** The most important thing that is wrong with the file, as a sentence. */
function problemOf(file: File, reader: RecordingReader, isCut: boolean, isRecording: boolean): string | null {
  if (file.size === 0) return `${file.name} is empty.`;
  if (!isRecording && isCut && reader.numUnread === 0) return `${file.name} has no complete line.`;
  if (!isRecording) return `${file.name} is not a recording of agentflow: none of its lines could be read.`;
  const { header, numUnread, firstUnread } = reader;
  if (header === null) {
    return `${file.name} has no header, so its beginning is missing: below is what could be read.`;
  }
  if (header.recording < 1 || header.recording > FORMAT_VERSION) {
    return (
      `${file.name} has version ${header.recording} of the format, and this page reads versions 1 to ${FORMAT_VERSION}: ` +
      "below is what could be read."
    );
  }
  if (numUnread > 0) {
    const lines = numUnread === 1 ? `Line ${count(firstUnread ?? 0)}` : `${count(numUnread)} lines`;
    const first = numUnread === 1 ? "" : ` (the first is line ${count(firstUnread ?? 0)})`;
    return `${lines} of ${file.name}${first} could not be read: below is everything else.`;
  }
  if (isCut) return `${file.name} ends in the middle of a line: below is everything before it.`;
  if (reader.ending === null)
    return `${file.name} ends before its session did: below is everything until then.`;
  return null;
}

/** How the session ended, as a sentence; null for a normal end. */
export function endingOf(reader: RecordingReader): string | null {
  if (reader.lost !== null) return `The connection to the backend was lost: ${reader.lost.message}`;
  if (reader.ending === "failed") return "An exception ended the session.";
  return reader.ending === "cancelled" ? "The session was cancelled." : null;
}

/** Resolves in a new task, after the browser had a chance to draw and to handle input. */
function nextTask(): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, 0));
}
