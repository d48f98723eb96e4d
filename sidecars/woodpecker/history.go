package main

import (
	"context"
	"fmt"
	"sort"
	"sync"

	"github.com/zilliztech/woodpecker/common/werr"
	"github.com/zilliztech/woodpecker/proto"
	"github.com/zilliztech/woodpecker/woodpecker"
	"github.com/zilliztech/woodpecker/woodpecker/log"
)

const (
	cursorsLimit = 16 // of a channel: readers that go on where they ended
	batchEntries = 200
)

// history reads what Woodpecker holds of one channel. It opens no writer, and so fences nobody.
type history struct {
	client woodpecker.Client
	log    string
	base   uint64

	mu      sync.Mutex
	handle  log.LogHandle
	cursors map[uint64]*cursor // by the id that comes next
}

// cursor is where a reader has come: the next entry, Woodpecker's own state of the reading, and what it has read beyond
// what was asked for.
type cursor struct {
	at    place
	state *proto.LastReadState
	ahead []record
}

// segment is what is known of a segment; `last` is its last entry, -1 where it has none.
type segment struct {
	number, last int64
	active       bool
	size, ended  int64
}

func newHistory(client woodpecker.Client, log string, base uint64) *history {
	return &history{client: client, log: log, base: base, cursors: map[uint64]*cursor{}}
}

func (h *history) opened(ctx context.Context) (log.LogHandle, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.handle == nil {
		handle, err := h.client.OpenLog(ctx, h.log)
		if err != nil {
			return nil, err
		}
		h.handle = handle
	}
	return h.handle, nil
}

func (h *history) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.handle != nil {
		_ = h.handle.Close(context.Background())
		h.handle = nil
	}
}

// segments are those that there are, in order; the truncated ones are left out.
func (h *history) segments(ctx context.Context) ([]segment, error) {
	handle, err := h.opened(ctx)
	if err != nil {
		return nil, err
	}
	known, err := handle.GetSegments(ctx)
	if err != nil {
		return nil, err
	}
	var found []segment
	for number, meta := range known {
		state := meta.Metadata.State
		if state == proto.SegmentState_Truncated {
			continue
		}
		each := segment{number, meta.Metadata.LastEntryId, state == proto.SegmentState_Active, meta.Metadata.Size, meta.Metadata.CompletionTime}
		if each.active {
			if each.last, err = h.lastOfActive(ctx, handle, number); err != nil {
				return nil, err
			}
		}
		found = append(found, each)
	}
	sort.Slice(found, func(i, j int) bool { return found[i].number < found[j].number })
	return found, nil
}

func (h *history) lastOfActive(ctx context.Context, handle log.LogHandle, number int64) (int64, error) {
	reading, err := handle.GetExistsReadonlySegmentHandle(ctx, number)
	if err != nil {
		return -1, err
	}
	last, err := reading.GetLastAddConfirmed(ctx)
	if isNotThere(err) {
		return -1, nil
	}
	return last, err
}

// isNotThere is whether an error says that an entry is not there, or its segment has none yet.
func isNotThere(err error) bool {
	return werr.ErrEntryNotFound.Is(err) || werr.ErrFileReaderEndOfFile.Is(err) ||
		werr.ErrFileReaderNoBlockFound.Is(err) || werr.ErrFileReaderNotFound.Is(err) || werr.ErrSegmentNotFound.Is(err)
}

// batch are some entries from a place on, in one segment.
func (h *history) batch(ctx context.Context, at place, limit int64, state *proto.LastReadState) (*proto.BatchReadResult, error) {
	handle, err := h.opened(ctx)
	if err != nil {
		return nil, err
	}
	reading, err := handle.GetExistsReadonlySegmentHandle(ctx, at.segment)
	if err != nil {
		return nil, err
	}
	result, err := reading.ReadBatchAdv(ctx, at.entry, limit, state)
	if werr.ErrFileReaderBlockDeletedByCompaction.Is(err) {
		return reading.ReadBatchAdv(ctx, at.entry, limit, nil)
	}
	return result, err
}

func (h *history) records(entry *proto.LogEntry) (uint64, []record, error) {
	at := place{entry.SegId, entry.EntryId}
	message, err := log.UnmarshalMessage(entry.Values)
	if err != nil {
		return 0, nil, corrupt("entry (%d, %d): %v", at.segment, at.entry, err)
	}
	return decodePack(message.Payload, h.base, at)
}

// pack is the one at a place: the highest timestamp up to it, and its records; none where there is no such entry.
func (h *history) pack(ctx context.Context, at place) (uint64, []record, error) {
	result, err := h.batch(ctx, at, 1, nil)
	if err != nil {
		if isNotThere(err) {
			err = nil
		}
		return 0, nil, err
	}
	for _, entry := range result.Entries {
		if entry.EntryId == at.entry {
			entry.SegId = at.segment
			return h.records(entry)
		}
	}
	return 0, nil, nil
}

// last is the id of the last record, with the highest timestamp up to it; 0 where there is none.
func (h *history) last(ctx context.Context) (uint64, uint64, error) {
	return h.lastBefore(ctx, place{segmentsLimit, 0})
}

// lastBefore is `last` of the packs before a place.
func (h *history) lastBefore(ctx context.Context, limit place) (uint64, uint64, error) {
	segments, err := h.segments(ctx)
	if err != nil {
		return 0, 0, err
	}
	for i := len(segments) - 1; i >= 0; i-- {
		at := place{segments[i].number, segments[i].last}
		if at.segment == limit.segment {
			at.entry = min(at.entry, limit.entry-1)
		}
		if at.segment > limit.segment || at.entry < 0 {
			continue
		}
		top, records, err := h.pack(ctx, at)
		if err != nil {
			return 0, 0, err
		}
		if len(records) == 0 {
			return 0, 0, fmt.Errorf("entry (%d, %d) of %s cannot be read now", at.segment, at.entry, h.log)
		}
		return records[len(records)-1].id, top, nil
	}
	return 0, 0, nil
}

// before is the id of the last record below `id`; 0 where there is none.
func (h *history) before(ctx context.Context, id uint64) (uint64, error) {
	at, index := placeOf(h.base, id)
	if index > firstOfSegment {
		_, records, err := h.pack(ctx, at)
		if err != nil {
			return 0, err
		}
		if below := min(index-firstOfSegment, len(records)); below > 0 {
			return records[below-1].id, nil
		}
	}
	found, _, err := h.lastBefore(ctx, at)
	return found, err
}

// read are records with ids from `position` to `last`, about as many as an answer takes. There is one at least where
// `last` is not below `position`, unless Woodpecker cannot tell it yet.
func (h *history) read(ctx context.Context, position, last uint64) ([]record, error) {
	reading := h.take(position)
	var found []record
	size := 0
	end, _ := placeOf(h.base, last)
	for {
		for i, each := range reading.ahead {
			if each.id > last || (len(found) > 0 && size+len(each.payload) > answerBytes) {
				reading.ahead = reading.ahead[i:]
				h.put(reading, found)
				return found, nil
			}
			if each.id >= position {
				found = append(found, each)
				size += len(each.payload)
			}
		}
		reading.ahead = nil
		if size >= answerBytes/2 || reading.at.segment > end.segment {
			h.put(reading, found)
			return found, nil
		}
		more, err := h.advance(ctx, reading)
		if err != nil {
			return nil, err
		}
		if !more {
			h.put(reading, found)
			return found, nil
		}
	}
}

// advance reads the next batch, or goes to the next segment; false where neither can be done now.
func (h *history) advance(ctx context.Context, reading *cursor) (bool, error) {
	result, err := h.batch(ctx, reading.at, batchEntries, reading.state)
	if isNotThere(err) {
		return h.nextSegment(ctx, reading, werr.ErrFileReaderEndOfFile.Is(err))
	}
	if err != nil {
		return false, err
	}
	for _, entry := range result.Entries {
		entry.SegId = reading.at.segment
		_, records, err := h.records(entry)
		if err != nil {
			return false, err
		}
		reading.ahead = append(reading.ahead, records...)
		reading.at.entry = entry.EntryId + 1
	}
	reading.state = result.LastReadState
	return len(result.Entries) > 0, nil
}

// nextSegment goes on in the next segment where this one has ended: before that it may still get entries.
func (h *history) nextSegment(ctx context.Context, reading *cursor, ended bool) (bool, error) {
	segments, err := h.segments(ctx)
	if err != nil {
		return false, err
	}
	for _, each := range segments {
		if each.number == reading.at.segment && !ended && (each.active || reading.at.entry <= each.last) {
			return false, nil
		}
		if each.number > reading.at.segment {
			reading.at, reading.state = place{each.number, 0}, nil
			return true, nil
		}
	}
	return false, nil
}

func (h *history) take(position uint64) *cursor {
	h.mu.Lock()
	defer h.mu.Unlock()
	if kept := h.cursors[position]; kept != nil {
		delete(h.cursors, position)
		return kept
	}
	at, _ := placeOf(h.base, position)
	return &cursor{at: at}
}

// put keeps the cursor for a reader that goes on behind the last record.
func (h *history) put(reading *cursor, found []record) {
	if len(found) == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.cursors) >= cursorsLimit {
		for position := range h.cursors {
			delete(h.cursors, position)
			break
		}
	}
	h.cursors[found[len(found)-1].id+1] = reading
}

// at is where to look for records with timestamps from `timestamp` on: no record before this id has one. 0 where no
// record has one.
func (h *history) at(ctx context.Context, timestamp uint64) (uint64, error) {
	segments, err := h.segments(ctx)
	if err != nil {
		return 0, err
	}
	var filled []segment
	for _, each := range segments {
		if each.last >= 0 {
			filled = append(filled, each)
		}
	}
	reaches := func(at place) bool {
		top, _, failed := h.pack(ctx, at)
		if failed != nil && err == nil {
			err = failed
		}
		return top >= timestamp
	}
	i := sort.Search(len(filled), func(i int) bool { return reaches(place{filled[i].number, filled[i].last}) })
	if err != nil || i == len(filled) {
		return 0, err
	}
	entry := sort.Search(int(filled[i].last)+1, func(entry int) bool { return reaches(place{filled[i].number, int64(entry)}) })
	return place{filled[i].number, int64(entry)}.id(h.base, firstOfSegment), err
}

// truncate lets Woodpecker remove the segments before the one of `id`. It does so some time later, by its own settings.
func (h *history) truncate(ctx context.Context, id uint64) error {
	at, _ := placeOf(h.base, id)
	if at.segment <= 0 {
		return nil
	}
	handle, err := h.opened(ctx)
	if err != nil {
		return err
	}
	return handle.Truncate(ctx, &log.LogMessageId{SegmentId: at.segment, EntryId: 0})
}
