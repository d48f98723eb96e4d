package main

import (
	"sort"
	"sync/atomic"
)

const (
	tailBytes      = 4 << 20   // of a channel that appends are made to
	tailShareBytes = 64 << 10  // the same while all tails together are over `tailsBytes`
	tailsBytes     = 256 << 20 // of all channels
	recordOverhead = 64
)

var tailsTotal atomic.Int64

// tail holds the last records of a channel in memory: all whose ids are above `from`. Woodpecker's own reader looks for
// new entries five times a second; who reads here hears of them at once.
type tail struct {
	records []record
	bytes   int64
	from    uint64
}

// add takes records whose ids are above all that are there, and forgets the oldest over the limit.
func (t *tail) add(records []record, limit int64) {
	t.records = append(t.records, records...)
	for _, each := range records {
		t.grow(int64(len(each.payload)) + recordOverhead)
	}
	if tailsTotal.Load() > tailsBytes {
		limit = min(limit, tailShareBytes)
	}
	t.keep(limit)
}

func (t *tail) keep(limit int64) {
	forgotten := 0
	for t.bytes > limit && forgotten < len(t.records) {
		each := t.records[forgotten]
		t.records[forgotten].payload = nil
		t.grow(-int64(len(each.payload)) - recordOverhead)
		t.from = each.id
		forgotten++
	}
	t.records = t.records[forgotten:]
}

func (t *tail) grow(bytes int64) {
	t.bytes += bytes
	tailsTotal.Add(bytes)
}

// at are the records from `position` on, about as many as an answer takes.
func (t *tail) at(position uint64) []record {
	start := sort.Search(len(t.records), func(i int) bool { return t.records[i].id >= position })
	end, size := start, 0
	for end < len(t.records) && (end == start || size+len(t.records[end].payload) <= answerBytes) {
		size += len(t.records[end].payload)
		end++
	}
	return append([]record(nil), t.records[start:end]...)
}

// restart forgets all; what follows has ids above `from`.
func (t *tail) restart(from uint64) {
	t.keep(0)
	t.from = from
}

// forgetBefore forgets the records with ids below `id`.
func (t *tail) forgetBefore(id uint64) {
	kept := int64(0)
	for i := len(t.records) - 1; i >= 0 && t.records[i].id >= id; i-- {
		kept += int64(len(t.records[i].payload)) + recordOverhead
	}
	t.keep(kept)
}
