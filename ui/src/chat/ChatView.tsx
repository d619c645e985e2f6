// The chat: turns with their branches, the reply as it streams, calls of tools, and the field to write in.
import type { CalledTool, Variable } from "agentflow-client";
import { effect, useSignal, useSignalEffect } from "@preact/signals";
import type { ComponentChildren, RefObject } from "preact";
import { useCallback, useLayoutEffect, useRef } from "preact/hooks";
import { announce } from "../app/announce";
import { focusNext } from "../app/focus";
import { hrefOf } from "../app/router";
import { session } from "../app/session";
import { typedNumber } from "../app/typedNumber";
import { View } from "../app/View";
import { ImageArea } from "../images/ImageArea";
import { isLost } from "../images/kept";
import type { ShownImage } from "../images/picture";
import { blindness } from "../images/sight";
import { Thumbnails } from "../images/Thumbnails";
import { copyText } from "../text/copy";
import { followEnd } from "../text/follow";
import {
  again,
  answer,
  callsOf,
  chats,
  conversation,
  current,
  deleteChat,
  deleted,
  draft,
  draftImages,
  isKept,
  isStreaming,
  keyOf,
  live,
  newChat,
  restoreChat,
  send,
  settings,
  show,
  stop,
  textOf,
  titleOf,
  type ToolUse,
} from "./chats";
import { openCalls, pathOf, siblingsOf, type Turn } from "./conversation";
import { lineOf } from "./figures";
import { MarkdownText } from "./MarkdownText";
import { StreamingReasoning, Reasoning } from "./Reasoning";
import "./chat.css";

export default function ChatView() {
  const path = pathOf(conversation.value);
  const list = useRef<HTMLOListElement>(null);
  useFollowReplies(list);
  const canTalk = session.value?.capabilities.roles !== false;
  return (
    <View
      name="chat"
      title="Chat"
      lead="Edit a turn to fork the conversation: every branch keeps its own future, and they share their prefix in the cache."
      actions={
        <>
          {chats.value.length > 1 && (
            <select
              aria-label="Chat"
              value={String(current.value)}
              onChange={(event) => (current.value = Number(event.currentTarget.value))}
            >
              {chats.value.map(([number, one]) => (
                <option key={number} value={String(number)}>
                  {titleOf(one)}
                </option>
              ))}
            </select>
          )}
          {deleted.value && (
            <button type="button" class="quiet restore-chat" aria-label="Undo the deletion of a chat" onClick={restore}>
              Undo
            </button>
          )}
          <button
            type="button"
            class="quiet delete-chat"
            aria-label="Delete this chat"
            disabled={path.length === 0 || isStreaming.value}
            onClick={() => {
              deleteChat();
              announce("Deleted the chat.");
              focusNext(".restore-chat");
            }}
          >
            Delete
          </button>
          <button
            type="button"
            disabled={path.length === 0}
            onClick={() => {
              newChat();
              focusNext(MESSAGE);
            }}
          >
            New chat
          </button>
        </>
      }
    >
      <div class="chat">
        {!canTalk && (
          <p class="view-note" data-testid="no-turns">
            This model has no chat template, so it cannot hold a conversation. The{" "}
            <a href={hrefOf("playground")}>playground</a> runs programs on it, without turns.
          </p>
        )}
        {!isKept.value && (
          <p class="view-note" data-testid="not-kept">
            The browser does not store the chats as they are now: a reload loses their newest turns.
          </p>
        )}
        <ol ref={list} class="turns" aria-label="Conversation" data-testid="turns">
          {path.map((turn) => (
            <TurnView key={`${current.value}/${turn.id}`} turn={turn} />
          ))}
        </ol>
        {path.length === 0 && <p class="empty">Nothing has been said yet.</p>}
        <Composer parent={path.at(-1)?.id ?? 0} canTalk={canTalk} />
        <SettingsFields />
      </div>
    </View>
  );
}

function restore(): void {
  restoreChat();
  announce("Restored the chat.");
  focusNext(".delete-chat");
}

/** Keeps the end of the conversation in the window: at first, and while a reply streams. */
function useFollowReplies(list: RefObject<HTMLElement | null>): void {
  useLayoutEffect(() => {
    if (!list.current || !document.scrollingElement) return;
    const following = followEnd(list.current, document.scrollingElement, () => isStreaming.peek());
    let frame = 0;
    const end = effect(() => {
      const { value: hasBegun } = isStreaming;
      cancelAnimationFrame(frame);
      // Once what the change adds is there: the turns, or the buttons below the complete reply.
      frame = requestAnimationFrame(() => (hasBegun ? following.toEnd() : following.catchUp()));
    });
    return () => {
      end();
      cancelAnimationFrame(frame);
      following.stop();
    };
  }, []);
}

const MESSAGE = '[data-testid="message"]';
const inTurn = (id: number, part: string): string => `[data-testid="turn-${id}"] ${part}`;

const NAMES = { user: "You", assistant: "Model", tool: "Tool" };

function TurnView({ turn }: { turn: Turn }) {
  const isEditing = useSignal(false);
  const streaming = live.value.get(keyOf(turn));
  const siblings = siblingsOf(conversation.value, turn);
  const place = siblings.indexOf(turn.id);
  const isBusy = isStreaming.value;
  const showSibling = (step: 1 | -1): void => {
    const to = siblings[place + step]!;
    show(to);
    const [previous, next] = [inTurn(to, ".previous"), inTurn(to, ".next")];
    if (step > 0) focusNext(next, previous);
    else focusNext(previous, next);
  };
  return (
    <li class={`chat-turn is-${turn.role}`} data-testid={`turn-${turn.id}`}>
      <header class="chat-head">
        <span class="chat-name" dir="auto">{turn.role === "tool" ? turn.call!.name : (turn.model ?? NAMES[turn.role])}</span>
        {siblings.length > 1 && (
          <span class="switch" role="group" aria-label="Branches of the conversation">
            <button
              type="button"
              class="quiet tool previous"
              aria-label="Previous branch"
              disabled={place === 0 || isBusy}
              onClick={() => showSibling(-1)}
            >
              ‹
            </button>
            <span data-testid="branch-place">
              {place + 1} / {siblings.length}
            </span>
            <button
              type="button"
              class="quiet tool next"
              aria-label="Next branch"
              disabled={place === siblings.length - 1 || isBusy}
              onClick={() => showSibling(1)}
            >
              ›
            </button>
          </span>
        )}
      </header>
      {isEditing.value ? (
        <Editor turn={turn} onEnd={() => (isEditing.value = false)} />
      ) : turn.role === "assistant" ? (
        streaming ? (
          <Streaming key="live" variable={streaming.variable} isReply={streaming.isReply} />
        ) : (
          <>
            <Reasoning text={turn.reasoning ?? ""} numTokens={turn.figures?.numReasoning} />
            <Finished turn={turn} />
          </>
        )
      ) : (
        <>
          <Thumbnails label="Images" images={turn.images ?? []} />
          {turn.content !== "" && (
            <p class="model-text" dir="auto">
              {turn.content}
            </p>
          )}
        </>
      )}
      {turn.role === "assistant" && !streaming && <Calls turn={turn} isBusy={isBusy} />}
      {turn.problem && (
        <p class="chat-problem" dir="auto">
          {turn.problem}
        </p>
      )}
      {!streaming && !isEditing.value && (
        <footer class="chat-tools">
          {turn.content !== "" && (
            <button type="button" class="quiet small" onClick={(event) => void copyText(turn.content, event.currentTarget)}>
              Copy
            </button>
          )}
          {turn.role === "user" && (
            <button type="button" class="quiet small edit" disabled={isBusy} onClick={() => (isEditing.value = true)}>
              Edit
            </button>
          )}
          {turn.role === "assistant" && (
            <button
              type="button"
              class="quiet small"
              disabled={isBusy || !session.value}
              onClick={() => {
                again(turn);
                focusNext(MESSAGE);
              }}
            >
              {turn.problem ? "Try again" : "Another reply"}
            </button>
          )}
          {turn.figures && <span class="hint">{lineOf(turn.figures)}</span>}
        </footer>
      )}
    </li>
  );
}

function Streaming({ variable, isReply }: { variable: Variable; isReply: boolean }) {
  const text = useCallback(() => textOf(variable, isReply), [variable]);
  const subscribe = useCallback((changed: () => void) => variable.onChange(changed), [variable]);
  const calls = useSignal<readonly CalledTool[]>([]);
  useSignalEffect(() =>
    variable.onChange(() => {
      if (!isReply) return;
      const now = callsOf(variable);
      if (now.length > 0) calls.value = now;
    }),
  );
  return (
    <div class="is-streaming">
      <StreamingReasoning variable={variable} hasText={() => text() !== "" || callsOf(variable).length > 0} />
      <MarkdownText text={text} subscribe={subscribe} />
      {calls.value.length > 0 && (
        <ul class="tool-calls">
          {calls.value.map((call) => (
            <Call key={call.id} call={call} />
          ))}
        </ul>
      )}
    </div>
  );
}

function Finished({ turn }: { turn: Turn }) {
  const text = useCallback(() => turn.content, [turn.content]);
  return <MarkdownText text={text} />;
}

/** A call with what can be done about it. */
function Call({ call, children }: { call: CalledTool; children?: ComponentChildren }) {
  return (
    <li class="tool-call">
      <p>
        The model calls <code>{call.name}</code>
      </p>
      <pre class="model-text" tabIndex={0} aria-label={`Arguments of ${call.name}`}>
        {call.arguments}
      </pre>
      {children}
    </li>
  );
}

function Calls({ turn, isBusy }: { turn: Turn; isBusy: boolean }) {
  const decide = (call: CalledTool, isAllowed: boolean): void => {
    answer(turn, call, isAllowed);
    focusNext(inTurn(turn.id, ".tool-call .primary"), MESSAGE); // the next open call
  };
  const { toolCalls = [], truncatedCalls = [] } = turn;
  if (toolCalls.length + truncatedCalls.length === 0) return null;
  const open = new Set(openCalls(conversation.value, turn).map((call) => call.id));
  return (
    <ul class="tool-calls">
      {toolCalls.map((call) => (
        <Call key={call.id} call={call}>
          {open.has(call.id) ? (
            <div class="row">
              <button type="button" class="primary" disabled={isBusy} onClick={() => decide(call, true)}>
                Run in this page
              </button>
              <button type="button" disabled={isBusy} onClick={() => decide(call, false)}>
                Decline
              </button>
            </div>
          ) : (
            <p class="hint">Answered.</p>
          )}
        </Call>
      ))}
      {truncatedCalls.map((call) => (
        <Call key={call.id} call={call}>
          <p class="hint">The reply ended before this call was complete.</p>
        </Call>
      ))}
    </ul>
  );
}

function Editor({ turn, onEnd }: { turn: Turn; onEnd: () => void }) {
  const text = useSignal(turn.content);
  const images = useSignal(turn.images ?? []);
  const canSend = canSay(text.value, images.value);
  const area = useRef<HTMLTextAreaElement>(null);
  useSignalEffect(() => area.current?.focus());
  const keep = (): void => {
    onEnd();
    focusNext(inTurn(turn.id, ".edit"));
  };
  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        if (!canSend || !session.value) return;
        onEnd();
        send(turn.parent, text.value, images.value);
        focusNext(MESSAGE);
      }}
    >
      <ImageArea
        label="the edited turn"
        images={images.value}
        onChange={(now) => (images.value = now)}
        actions={
          <>
            <button type="button" class="quiet" onClick={keep}>
              Keep as it is
            </button>
            <button type="submit" class="primary" disabled={!session.value || !canSend}>
              Send as a branch
            </button>
          </>
        }
      >
        <textarea
          ref={area}
          rows={3}
          aria-label="The edited turn"
          value={text.value}
          onInput={(event) => (text.value = event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === "Escape") keep();
            else submitOnEnter(event);
          }}
        />
      </ImageArea>
    </form>
  );
}

function submitOnEnter(event: KeyboardEvent): void {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  (event.currentTarget as HTMLTextAreaElement).form?.requestSubmit();
}

/** Whether a turn says something that can be sent. */
function canSay(text: string, images: readonly ShownImage[]): boolean {
  if (images.length === 0) return text.trim() !== "";
  return !images.some(isLost) && blindness(session.value) === null;
}

function Composer({ parent, canTalk }: { parent: number; canTalk: boolean }) {
  const isBusy = isStreaming.value;
  const canSend = session.value !== null && canTalk && canSay(draft.value, draftImages.value);
  return (
    <form
      class="composer panel"
      onSubmit={(event) => {
        event.preventDefault();
        if (isBusy || !canSend) return;
        send(parent, draft.value, draftImages.value);
        draft.value = "";
        draftImages.value = [];
      }}
    >
      <ImageArea
        label="the message"
        images={draftImages.value}
        onChange={(now) => (draftImages.value = now)}
        isOff={!canTalk}
        isPageWide
        actions={
          <>
            {!session.value && <span class="hint">Not connected</span>}
            {isBusy ? (
              <button type="button" class="stop" data-testid="stop" onClick={stop}>
                Stop
              </button>
            ) : (
              <button type="submit" class="primary" data-testid="send" disabled={!canSend}>
                Send
              </button>
            )}
          </>
        }
      >
        <textarea
          rows={2}
          aria-label="Message"
          placeholder="Say something. Enter sends, Shift and Enter begins a line."
          data-testid="message"
          value={draft.value}
          onInput={(event) => (draft.value = event.currentTarget.value)}
          onKeyDown={submitOnEnter}
        />
      </ImageArea>
    </form>
  );
}

function SettingsFields() {
  const now = settings.value;
  const canCall = session.value?.capabilities.conversations === true;
  return (
    <details class="chat-settings">
      <summary>Settings</summary>
      <div class="chat-settings-fields">
        <label class="field wide">
          <span>System</span>
          <textarea
            rows={2}
            value={now.system}
            onInput={(event) => (settings.value = { ...now, system: event.currentTarget.value })}
          />
        </label>
        {(
          [
            ["temperature", "Temperature", 0, 2, 0.1],
            ["topP", "Top p", 0.01, 1, 0.05],
            ["maxTokens", "Max tokens", 1, 100_000, 1],
          ] as const
        ).map(([name, label, min, max, step]) => (
          <label key={name} class="field">
            <span>{label}</span>
            <input
              type="number"
              min={min}
              max={max}
              step={step}
              value={now[name]}
              onChange={(event) => {
                settings.value = { ...now, [name]: typedNumber(event.currentTarget) ?? now[name] };
              }}
            />
          </label>
        ))}
        <label class="field wide">
          <span>A calculator and a clock. The page runs a call only when you allow it.</span>
          <select
            aria-label="Tools"
            value={now.tools}
            disabled={!canCall}
            onChange={(event) => (settings.value = { ...now, tools: event.currentTarget.value as ToolUse })}
          >
            <option value="none">No tools</option>
            <option value="auto">The model may call them</option>
            <option value="required">Each message is answered by a call</option>
          </select>
        </label>
      </div>
    </details>
  );
}
