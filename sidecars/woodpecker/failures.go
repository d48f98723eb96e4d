package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/zilliztech/woodpecker/common/werr"
)

// tidewalError is an error with the name and the fields that it has in Tidewal (runtime/errors.py).
type tidewalError struct {
	code, message string
	fields        map[string]any
}

func (e *tidewalError) Error() string { return e.code + ": " + e.message }

func (e *tidewalError) wire() map[string]any {
	fields := e.fields
	if fields == nil {
		fields = map[string]any{}
	}
	return map[string]any{"code": e.code, "message": e.message, "fields": fields}
}

func failure(code, message string, fields map[string]any) error {
	return &tidewalError{code, message, fields}
}

func invalid(message string) error { return failure("InvalidRequest", message, nil) }

func notFound(channel string) error {
	return failure("ChannelNotFound", "no channel "+channel+"; create it first", map[string]any{"channel": channel})
}

func fenced(channel string) error {
	message := "another sidecar has taken over the log: this one appends nothing more to " + channel
	return failure("Fenced", message, map[string]any{"channel": channel})
}

// translated is the error of Tidewal for one of Woodpecker or etcd. `sent` says that an append was handed over before
// it: then the append may be in the log all the same.
func translated(err error, channel string, sent bool) *tidewalError {
	var known *tidewalError
	if errors.As(err, &known) {
		return known
	}
	var found *tidewalError
	switch {
	case isFence(err):
		found = fenced(channel).(*tidewalError)
	case werr.ErrFileReaderCRCMismatch.Is(err), werr.ErrFileReaderCorrupted.Is(err), werr.ErrChecksumError.Is(err):
		found = &tidewalError{"CorruptLog", fmt.Sprintf("channel %s: %v", channel, err), nil}
	case errors.Is(err, context.Canceled):
		found = &tidewalError{"Unavailable", "the sidecar is closing", nil}
	default:
		found = &tidewalError{"Unavailable", fmt.Sprintf("Woodpecker, channel %s: %v", channel, err), nil}
	}
	if sent {
		fields := map[string]any{"outcome_unknown": true}
		for name, value := range found.fields {
			fields[name] = value
		}
		found.fields = fields
	}
	return found
}

// isFence is whether the error says that another writer has the log. Which one a deposed writer meets depends on what
// it does next: append to its segment, complete it, or create the next one.
func isFence(err error) bool {
	return werr.ErrSegmentFenced.Is(err) || werr.ErrLogWriterLockLost.Is(err) ||
		werr.ErrMetadataSegmentAlreadyExists.Is(err) || werr.ErrMetadataRevisionInvalid.Is(err)
}
