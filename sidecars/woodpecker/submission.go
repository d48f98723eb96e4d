package main

import (
	"encoding/binary"
	"sync"
)

// submission is one append request, which may go to several channels: each gets a part. It is answered once, when all
// parts are decided: with the ids in the order of its records, or with the first error.
type submission struct {
	mu     sync.Mutex
	ids    []byte
	open   int
	stored bool
	err    *tidewalError
	answer func(ids []byte, err *tidewalError)
}

// part is what one channel gets of a submission: records without ids, and where these belong among the ids.
type part struct {
	of      *submission
	records []record
	places  []int
}

func (p *part) size() int {
	size := 0
	for _, each := range p.records {
		size += len(each.payload) + recordOverhead
	}
	return size
}

// split cuts the part into some that each fit into a pack.
func (p *part) split() []*part {
	var parts []*part
	start, size := 0, 0
	for i, each := range p.records {
		if i > start && (size+len(each.payload) > packBytes || i-start == packRecords) {
			parts = append(parts, &part{p.of, p.records[start:i], p.places[start:i]})
			start, size = i, 0
		}
		size += len(each.payload)
	}
	parts = append(parts, &part{p.of, p.records[start:], p.places[start:]})
	p.of.mu.Lock()
	p.of.open += len(parts) - 1
	p.of.mu.Unlock()
	return parts
}

// done says that the records of a part are in the log; they have their ids.
func (p *part) done() {
	p.of.mu.Lock()
	for i, each := range p.records {
		binary.BigEndian.PutUint64(p.of.ids[8*p.places[i]:], each.id)
	}
	p.of.stored = true
	p.of.closePart()
}

func (p *part) fail(err *tidewalError) {
	p.of.mu.Lock()
	if p.of.err == nil {
		p.of.err = err
	}
	p.of.closePart()
}

// closePart is called with the lock, which it releases. Where one part failed and another is in the log, the outcome of
// the whole is unknown.
func (s *submission) closePart() {
	s.open--
	over := s.open == 0
	err := s.err
	if over && err != nil && s.stored {
		err = ofUnknownOutcome(err)
	}
	s.mu.Unlock()
	if over {
		s.answer(s.ids, err)
	}
}
